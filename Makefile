# `make demo` and `make test` work from a fresh clone: each makes .venv first, and finds it ready the second time.
.DEFAULT_GOAL := help
BIN := .venv/bin
TIERS := unit contract property engine e2e

.PHONY: help setup demo test check-clients cross-check $(addprefix test-,$(TIERS)) check format protos lock models clean

help: ## what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16
	@echo "test-TIER       one tier: $(TIERS)"

setup: ## make .venv (quick when it is up to date)
	@scripts/setup.sh

demo: setup ## serve a model split and colocated, ask it, compare, shut down
	@$(BIN)/python -m coordinator.demo

test: setup ## checks and every tier (budgets: tests/README.md)
	@scripts/check.sh; checked=$$?; scripts/test.sh && exit $$checked

$(addprefix test-,$(TIERS)): test-%: setup
	@scripts/test.sh $*

check: setup ## ruff, mypy, import contracts, buf, stub drift
	@scripts/check.sh

check-clients: setup ## openai, gRPC, guidellm, vllm bench serve and aiperf against a running system (minutes)
	@scripts/check_clients.sh

cross-check: setup ## TTFT, TPOT, ITL and throughput of one run by guidellm and vllm bench serve beside ours (minutes)
	@scripts/check_clients.sh crosscheck

format: setup ## ruff format and safe fixes
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format .

protos: setup ## regenerate the committed stubs
	@scripts/protos.sh

lock: setup ## regenerate requirements/*.lock
	@$(BIN)/python scripts/lock.py

models: setup ## fetch the small chat model
	@$(BIN)/splitpoint models fetch smollm2

clean: ## remove .venv, caches and run records; fetched models stay
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist runs *.egg-info
