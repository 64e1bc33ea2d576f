# The whole project from here: `make demo` shows the main job, `make test` passes the tests.
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready

.PHONY: demo test check bench soak setup clean

$(READY): pyproject.toml constraints.txt requirements-dev.txt tools/setup
	@tools/setup $(VENV)
	@touch $(READY)

setup: $(READY)

demo: $(READY)
	@$(PY) examples/demo.py

test: $(READY)
	@$(PY) -m pytest -m "not soak" $(ARGS)

soak: $(READY)
	@$(PY) -m pytest -m soak $(ARGS)

check: $(READY)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

# make bench NAME=start, or all of them
bench: $(READY)
	@$(PY) -m bench $(NAME)

clean:
	rm -rf $(VENV) .venvs build dist *.egg-info
