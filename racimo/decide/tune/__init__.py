"""What a tune run does next: which points to try, which trial gets the next slice, how many workers it needs."""
