# `make` lists the verbs. Each one sets the environment up first, which takes no time once done.
PYTHON ?= python3
BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help setup demo test extras monitoring check audit chaos chaostest fmt clean

help: ## list the verbs
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## make .venv with everything for demo and tests
	@$(PYTHON) scripts/setup.py --profile dev

demo: ## start all stages on this machine and ask the small model about pictures
	@$(PYTHON) scripts/setup.py --profile full
	$(BIN)/epd demo

check: setup ## lint, types, import walls and the fast tests; under 2 minutes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy scripts/setup.py
	$(BIN)/lint-imports
	$(BIN)/python scripts/write_docs.py --check
	$(BIN)/python scripts/audit.py
	$(BIN)/python -m pytest -q -n 3 -m "not vllm and not docker and not slow and not chaos and not prometheus" --durations=15

audit: setup ## ask an advisory service about the dependencies; fails where none answers
	$(BIN)/python scripts/audit.py --strict

test: setup ## every test that needs no Docker engine, with real vLLM on the CPU
	$(BIN)/python -m pytest -n 2 -m "not vllm and not docker and not chaos and not extra and not prometheus" --durations=15
	$(BIN)/python -m pytest -m "vllm and not docker and not extra" --durations=15

extras: setup ## what takes long: more models, plain vLLM servers, vLLM's proxy, odd requests, three stages, the page; 14 minutes
	scripts/browser.sh
	$(BIN)/python -m pytest -m "extra and not docker" --durations=15

monitoring: setup ## dashboards and alerts on a real Prometheus, Debian's package unpacked into build/
	scripts/prometheus.sh
	$(BIN)/python -m pytest -m prometheus --durations=5

chaostest: setup ## 2,200 requests while processes are killed; 5 minutes
	$(BIN)/python -m pytest -m chaos -s

chaos: setup ## 10,000 requests while processes are killed; 15 minutes; results in build/chaos
	$(BIN)/python -m bench.chaos --requests 10000 --seed 7 --rate 12

fmt: setup ## format, and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove everything the verbs made, the environment included
	rm -rf .venv .epd build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
