# make demo | make test | make test-full | make wheel | make lock
#
# TORCH=cpu takes PyTorch's CPU build (0.7 GB in place of 5) from PyTorch's own download site. That site
# is not reachable everywhere; the default takes the build that the package index has. The CPU path is
# not covered by the tests.
PYTHON ?= python3
TORCH  ?= default
BIN    := .venv/bin
INSTALL = $(shell command -v uv || echo $(BIN)/uv) pip install --python $(BIN)/python

.PHONY: venv demo test test-full test-sweep check wheel lock mosquitto postgresql clean

venv: .venv/.ready

.venv/.ready: requirements/base.txt requirements/torch.txt requirements/executorch.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or later is needed, this is " + sys.version) if sys.version_info < (3, 10) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	command -v uv >/dev/null || $(BIN)/python -m pip install --quiet uv
	$(INSTALL) --quiet --require-hashes -r requirements/base.txt
ifeq ($(TORCH),cpu)
	$(INSTALL) --quiet --torch-backend=cpu -r requirements/torch.in -c requirements/base.txt
else
	$(INSTALL) --quiet --require-hashes --no-deps -r requirements/torch.txt
endif
	$(INSTALL) --quiet --require-hashes --no-deps -r requirements/executorch.txt
	$(INSTALL) --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: venv
	$(BIN)/edge-sdk demo --out demo-out

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check mosquitto postgresql
	$(BIN)/pytest -m "not full and not sweep"

test-full: venv mosquitto postgresql
	$(BIN)/pytest -m full

test-sweep: venv mosquitto
	$(BIN)/pytest -m sweep

# The tests run against a real mosquitto. Where apt may not install it, they fail with how to get it.
mosquitto:
	@command -v mosquitto >/dev/null || test -x /usr/sbin/mosquitto || \
	  { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
	    apt-get install -y -qq mosquitto >/dev/null; } || \
	  echo "mosquitto is missing and could not be installed; tests that need it will fail" >&2

# The store's tests run against a real PostgreSQL too, in a cluster of their own.
postgresql:
	@command -v postgres >/dev/null || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || \
	  { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
	    apt-get install -y -qq postgresql >/dev/null; } || \
	  echo "postgresql is missing and could not be installed; tests that need it will fail" >&2

wheel: venv
	$(BIN)/python -m hatchling build -t wheel

COMPILE = uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --no-header
# torch.txt leaves out what base.txt has on every Python.
lock:
	$(COMPILE) --upgrade --all-extras --group dev --override requirements/no-torch.txt \
	  --no-emit-package edge-sdk-fl pyproject.toml -o requirements/base.txt
	$(COMPILE) --upgrade -c requirements/base.txt requirements/torch.in -o requirements/torch.txt \
	  $$(sed -nE 's/^([a-z0-9._-]+)==[^ ;]+ .$$/--no-emit-package \1/p' requirements/base.txt)
	$(COMPILE) --upgrade --no-deps -c requirements/base.txt requirements/executorch.in \
	  -o requirements/executorch.txt \
	  $$(sed -nE 's/^([a-z0-9._-]+)==[^ ;]+ .$$/--no-emit-package \1/p' requirements/base.txt)

clean:
	rm -rf .venv dist demo-out
