"""Pictures of studies. A chart is a list of marks (`scene`); `svg` and `png` draw them. Nothing is needed for HTML; PNG
is drawn with Pillow."""
