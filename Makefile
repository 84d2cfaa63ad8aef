# Each target sets itself up: it makes .venv and installs the project with the extras of the target.
# It installs again only when the metadata, the pins, the C sources or the switches have changed.
#
#   PYTHON   the interpreter of .venv (after a change: make clean)
#   ARGS     arguments of the command that demo, test, bench and others run
#   WORKERS  processes that share the test files; 0 runs them in pytest's own, as --pdb needs
#   JOBS     steps of `make check` at the same time
#   CC, SHMBUS_DEBUG, SHMBUS_SANITIZE, SHMBUS_WERROR   how the extension is compiled; see setup.py

PYTHON ?= python3
ARGS ?=
WORKERS ?= 6
JOBS ?= $(shell nproc)
export SHMBUS_DEBUG SHMBUS_SANITIZE SHMBUS_WERROR
# Images of containers often set it, and then each of hundreds of processes compiles what it imports.
export PYTHONDONTWRITEBYTECODE :=
# pip compiles all of PyTorch and transformers; half of an install, where a first import takes seconds.
export PIP_COMPILE := 0

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

# Whole programs, and kills and storms over many processes: `make test` leaves them to a target of
# their own, and the rules of the house to `make check`.
PROGRAMS := examples bench process
ELSEWHERE := $(PROGRAMS) house

# Tests are shared out by file, so that a file's fixtures are set up once and its tests keep their
# order. Long ones run first (tests/conftest.py).
DISTRIBUTED = -n $(WORKERS) --dist loadfile --no-loadscope-reorder -p no:benchmark

C_SOURCES := $(sort $(shell find shmbus_ext -name "*.c"))
C_HEADERS := $(sort $(shell find shmbus_ext -name "*.h")) $(sort $(wildcard shmbus_ext/_public*.pyi))
# The ring without Python; the C tests, the fuzzers and the explorer link it.
RING_SOURCES := $(sort $(wildcard shmbus_ext/base/*.c shmbus_ext/ring/*.c))
# What they link: the ring, and what else of the core stands alone.
C_TESTED := $(RING_SOURCES) shmbus_ext/batch/helpers.c shmbus_ext/pool/patch_code.c
# A C test is one file with its own main, linked with the ring; exit status 0 means success.
C_TESTS := $(patsubst tests/c/%.c,%,$(sort $(wildcard tests/c/*.c)))
C_STRICT := -std=c11 -Wall -Wextra -Wconversion -Werror -pthread -Ishmbus_ext
C_TEST_SECONDS := 300
# step_kill uses ptrace, which qemu-user lacks; it would take hours under valgrind; and it has one
# thread, so TSan would find nothing.
UNSTEPPED_TESTS := $(filter-out step_kill,$(C_TESTS))
comma := ,

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two targets must not install into one environment at the same time. What a recipe runs side by side
# has its environment.
ifndef SIDE_BY_SIDE
.NOTPARALLEL:
endif
side_by_side = +@$(MAKE) --no-print-directory --output-sync=target --jobs=$(JOBS) SIDE_BY_SIDE=1
.PHONY: help demo demo-real test test-programs test-peers test-peers-all test-adapters test-engines test-once test-relay test-site test-web check docs
.PHONY: bench bench-calls
.PHONY: bench-contenders bench-report explore fuzz soak interrupts kills points week storm test-agents test-templates ends versions leaks valgrind
.PHONY: cross sanitize clean FORCE

help: ## Show this list
	@echo 'usage: make TARGET [ARGS="..."] [PYTHON=python3.x]'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 20
	@echo 'Targets have environments of their own, made when first needed.'

demo: $(VENV)/.demo ## Train a small policy over the bus, workers and trainer on this machine
	@$(BIN)/shmbus demo $(ARGS)

REAL_MODEL ?= build/real-model
demo-real: build/peers/vllm/.made ## Train SmolLM2-135M over a real vLLM until its reward rises; resumes after a kill
	@[ -d $(REAL_MODEL) ] || build/peers/vllm/bin/python -m trainer_adapter.demo.smollm2 $(REAL_MODEL)
	@build/peers/vllm/bin/shmbus demo --engine vllm --model $(REAL_MODEL) --output build/demo-real $(ARGS)

test: $(VENV)/.dev ## Run the test suite, but for whole programs and the rules of the house
	$(BIN)/pytest $(DISTRIBUTED) $(foreach folder,$(ELSEWHERE),--ignore=tests/$(folder)) $(ARGS)

test-programs: $(VENV)/.dev ## Run kills and storms, the examples, the first hour and the benchmark's programs in their quick forms
	$(BIN)/pytest $(DISTRIBUTED) --dist worksteal $(ARGS) $(PROGRAMS:%=tests/%)

test-peers: build/peers/atropos/.made ## Run Atropos' own tests against the gateway, and test its adapter
	HF_HUB_OFFLINE=1 build/peers/atropos/bin/pytest -p no:cacheprovider $(ARGS) tests/peers/atropos

build/peers/atropos/.made: tests/peers/atropos/requirements.txt constraints.txt pyproject.toml $(C_SOURCES) $(C_HEADERS)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt \
	    -r $< -e '.[gateway]' pytest pytest-asyncio pytest-timeout
	@touch $@

test-engines: build/peers/vllm/.made build/peers/sglang/.made ## Test updates of real vLLM servers on the CPU, and what SGLang decodes (minutes)
	build/peers/sglang/bin/pytest -p no:cacheprovider -W ignore $(ARGS) tests/engines/test_sglang.py tests/peers/sglang
	HF_HUB_OFFLINE=1 build/peers/vllm/bin/pytest -p no:cacheprovider -o faulthandler_timeout=1900 \
	    $(ARGS) tests/peers/vllm

test-agents: build/peers/recorder/.made build/peers/vllm/.made ## Test real clients and harnesses through the recorder, before a real vLLM on the CPU (minutes)
	HF_HUB_OFFLINE=1 LITELLM_LOCAL_MODEL_COST_MAP=True build/peers/recorder/bin/python -m pytest \
	    -p no:cacheprovider -W ignore -o faulthandler_timeout=1900 $(ARGS) tests/peers/recorder

# The source package of llama-cpp-python holds the chat templates of many models.
TEMPLATES := https://files.pythonhosted.org/packages/ec/e9/e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/llama_cpp_python-0.3.36.tar.gz
test-templates: $(VENV)/.dev build/templates/.made ## Test stitched conversations under the chat templates of twenty models (73 MiB to download)
	SHMBUS_TEST_TEMPLATES=build/templates $(BIN)/pytest -p no:benchmark $(ARGS) tests/recorder/test_real_templates.py

build/templates/.made:
	mkdir -p $(@D)
	curl -fsSL $(TEMPLATES) | tar xz -C $(@D) --strip-components=5 --wildcards '*/models/templates/*.jinja'
	@touch $@

build/peers/recorder/.made: tests/peers/recorder/requirements.txt pyproject.toml $(C_SOURCES) $(C_HEADERS)
	$(make_stack)

# torchvision and torchaudio come with vLLM for CUDA, and keep transformers from importing here.
build/peers/vllm/.made: tests/peers/vllm/requirements.txt pyproject.toml $(C_SOURCES) $(C_HEADERS)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -qq -r $< -e '.[engines]' \
	    pytest pytest-asyncio pytest-timeout
	$(@D)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

build/peers/sglang/.made: tests/peers/sglang/requirements.txt pyproject.toml $(C_SOURCES) $(C_HEADERS)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -qq -r $< -e '.[engines]' \
	    pytest pytest-asyncio pytest-timeout
	$(@D)/bin/python -m pip --disable-pip-version-check install -qq --no-deps sglang==0.5.23
	@touch $@

test-once: $(VENV)/.dev ## Kill and resume jobs of changing size, a hundred times (minutes)
	SHMBUS_ONCE_ROUNDS=100 $(BIN)/pytest -p no:cacheprovider -p no:benchmark $(ARGS) tests/trainer/test_trained_once.py

test-relay: $(VENV)/.dev ## Test the relay on Ray clusters of several nodes (minutes; ARGS="-m 'not slow'": half a minute)
	$(BIN)/pytest -p no:cacheprovider -p no:benchmark $(ARGS) tests/peers/ray

test-web: build/web/.made ## Test the page in a real headless browser (SHMBUS_CHROMIUM)
	build/web/bin/pytest -p no:cacheprovider $(ARGS) tests/web

test-site: build/web/.made docs ## Ask the site 40 questions in a real headless browser (SHMBUS_CHROMIUM)
	build/web/bin/pytest -p no:cacheprovider $(ARGS) tests/web/test_site.py

build/web/.made: constraints.txt pyproject.toml $(C_SOURCES) $(C_HEADERS)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt \
	    -e '.[web-test]' pytest pytest-asyncio pytest-timeout
	@touch $@

# Environments of trainers and environments as they are; with NEWEST=1 beside these, without the pins.
STACKS := build/peers$(if $(NEWEST),-newest)
define make_stack
	$(PYTHON) -m venv $(@D)
	sed '$(if $(NEWEST),s/==[^ ]*//)' $< > $(@D)/requirements.txt
	$(@D)/bin/python -m pip --disable-pip-version-check install -qq -r $(@D)/requirements.txt -e . \
	    pytest pytest-asyncio pytest-timeout
	@touch $@
endef

test-adapters: $(STACKS)/trl/.made ## Test the TRL adapter against TRL itself (ARGS="-m 'not slow'": a minute; NEWEST=1)
	HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1 OMP_NUM_THREADS=1 $(STACKS)/trl/bin/pytest \
	    -p no:cacheprovider -W ignore -o faulthandler_timeout=1000 $(ARGS) tests/peers/trl

$(STACKS)/trl/.made: tests/peers/trl/requirements.txt pyproject.toml $(C_SOURCES) $(C_HEADERS)
	$(make_stack)

PEERS := openenv peft verifiers verl
test-peers-all: $(PEERS:%=test-peer-%) test-peers ## Test the adapters of other trainers and environments (11 GB, minutes; NEWEST=1)

test-peer-%: $(STACKS)/%/.made
	HF_HUB_OFFLINE=1 RAY_AUTH_MODE=disabled $(STACKS)/$*/bin/python -m pytest -p no:cacheprovider \
	    -W ignore -o faulthandler_timeout=1000 $(ARGS) tests/peers/$*

# Else make would take it for a step in between, and remove it.
.PRECIOUS: $(STACKS)/%/.made
$(STACKS)/%/.made: tests/peers/%/requirements.txt pyproject.toml $(C_SOURCES) $(C_HEADERS)
	$(make_stack)

check: $(VENV)/.dev ## Check lint, formatting, types, rules of the house, C warnings; run the C tests and short searches
	$(side_by_side) check-explore check-c check-python check-house

.PHONY: check-house
check-house: $(VENV)/.dev
	$(BIN)/pytest -p no:benchmark tests/house

.PHONY: check-python
check-python: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/house/prose.py

docs: $(VENV)/.docs $(VENV)/.dev ## Build the documentation site into build/site; a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/pytest -q -p no:cacheprovider tests/house/test_reference.py

bench: $(VENV)/.bench ## Measure shmbus and other ways to move a trajectory (five minutes; ARGS=--full)
	@$(BIN)/shmbus bench $(ARGS)

bench-calls: $(VENV)/.bench ## Time the hot calls, and check the instruction counts of the C core
	$(BIN)/pytest -o addopts= --benchmark-columns=min,median,iqr,rounds --benchmark-sort=name bench/calls.py $(ARGS)
	$(BIN)/python -m bench.instructions check

# RESULT: where the figures are kept; the pages show those of two-cores.json. LEVEL=--tiny tries it.
RESULT ?= bench/results/two-cores.json
LEVEL ?= --full
bench-report: $(VENV)/.bench ## Measure everything into RESULT, and fill the tables of the pages
	$(BIN)/shmbus bench $(LEVEL) --output $(RESULT) $(ARGS)
	$(BIN)/python -m bench.report README.md bench/README.md

explore: build/explore/ring/explore build/explore/pool/explore build/explore/channel/explore ## Search interleavings of ring, pool and channel, and find planted bugs (half an hour)
	build/explore/ring/explore --deep $(ARGS)
	build/explore/pool/explore --preemptions 2 --states 14000000
	build/explore/channel/explore --preemptions 2 --states 14000000
	$(side_by_side) $(SEEDS:%=found-%)

fuzz: fuzz-c fuzz-python ## Fuzz the readers of segments, messages and snapshots for MINUTES (needs clang)

# SOAK=soak runs without daemon and ranks. RESTARTS=1000 kills the daemon 1,000 times.
SOAK ?= daemon_soak
soak: $(VENV)/.dev ## Run daemon, ranks and producers under random faults for MINUTES, then audit
	PYTHONPATH=tests $(BIN)/python tests/process/$(SOAK).py soak-$$$$ $$(( $(MINUTES) * 60 )) $(or $(SEED),$$$$) $(RESTARTS)

KILLS ?= 10000
kills: $(VENV)/.dev ## Kill KILLS producers with SIGKILL at random instants
	SHMBUS_TEST_KILLS=$(KILLS) $(BIN)/pytest tests/process/test_death.py -k killed_writers $(ARGS)

# Seeded: SEED=N runs the same again.
INJECTIONS ?= 100000
SIGNALS ?= 1000
interrupts: $(VENV)/.dev ## Raise INJECTIONS exceptions and send SIGNALS of each signal in every path, and audit
	$(BIN)/python tests/interrupt/sweep.py sweep-$$$$ $(INJECTIONS) $(SEED)
	$(BIN)/python tests/interrupt/signals.py signals-$$$$ $(SIGNALS) $(SEED)

WEEKS ?= 20
week: $(VENV)/.dev ## Run WEEKS weeks of a run with all that goes wrong in them, and audit each
	SHMBUS_TEST_WEEKS=$(WEEKS) $(BIN)/pytest -s -p no:benchmark tests/process/test_week.py $(ARGS)

# PAIRS ends the storm before the minutes are over.
PAIRS ?= 100000
storm: $(VENV)/.dev ## Raise PAIRS of faults over a whole system for MINUTES, the second one in the first, and audit
	SHMBUS_TEST_PAIRS=$(PAIRS) SHMBUS_TEST_STORM=$$(( $(MINUTES) * 60 )) $(BIN)/pytest -s -p no:benchmark \
	    -o faulthandler_timeout=$$(( $(MINUTES) * 60 + 500 )) tests/process/test_second_fault.py $(ARGS)

points: $(VENV)/.dev ## Kill and stop every process at each of its failpoints, at first and later passes
	SHMBUS_TEST_POINTS=all $(BIN)/pytest tests/process/test_failpoints.py $(ARGS)

ends: $(VENV)/.dev ## End every life in every way, each cell of the matrix by itself, and audit
	SHMBUS_TEST_ENDS=all $(BIN)/pytest $(DISTRIBUTED) --dist worksteal -o faulthandler_timeout=1300 $(ARGS) tests/ends

versions: $(VENV)/.dev ## Test with other versions of torch, transformers, flash-attn (half an hour)
	$(BIN)/python tests/versions.py $(ARGS)

leaks: $(VENV)/.dev ## Count the resources that 10,000 cycles of everything leave behind
	$(BIN)/python tests/process/leaks.py leaks-$$$$ 10000
	$(BIN)/python tests/process/leaks.py leaks-$$$$ 10000 weights

# Threads of helpers_test park until the process ends: valgrind takes these for leaks, ASan does not.
valgrind: $(addprefix build/c/valgrind/,$(filter-out helpers_test,$(UNSTEPPED_TESTS))) ## Run the C tests under valgrind
	@for test in $^; do valgrind -q --error-exitcode=1 --leak-check=full $$test || exit 1; done

cross: $(addprefix build/c/aarch64/,$(UNSTEPPED_TESTS)) ## Build the C tests for aarch64 and run them under qemu-user
	@for test in $^; do qemu-aarch64 $$test || exit 1; done

sanitize: $(VENV)/.dev sanitize-c sanitize-python ## Run the C tests under ASan, UBSan and TSan, the suite under ASan and UBSan

clean: ## Remove the environments and everything that was built
	rm -rf $(VENV) $(CONTENDERS) build dist *.egg-info shmbus_ext/*.so
	rm -rf .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment

$(VENV)/.created:
	@sh .ci/requirements.sh $(PYTHON)
	@echo 'making $(VENV) with $(PYTHON)'
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# Rewritten only if the switches differ from those of the last build.
$(VENV)/.switches: $(VENV)/.created FORCE
	@echo '$(CC) $(SHMBUS_DEBUG) $(SHMBUS_SANITIZE) $(SHMBUS_WERROR)' | cmp -s - $@ || \
	    echo '$(CC) $(SHMBUS_DEBUG) $(SHMBUS_SANITIZE) $(SHMBUS_WERROR)' > $@

INSTALL_INPUTS := pyproject.toml setup.py constraints.txt $(VENV)/.switches \
    $(C_SOURCES) $(C_HEADERS)

$(VENV)/.demo: EXTRAS := demo
$(VENV)/.dev: EXTRAS := dev,train
$(VENV)/.bench: EXTRAS := bench-all,train
$(VENV)/.fuzz: EXTRAS := dev,fuzz
$(VENV)/.docs: EXTRAS := docs

# Editable, so that the sources of the checkout run. The build requirements are installed into the
# environment itself and not into a temporary one, so that a changed C file needs no network.
$(VENV)/.demo $(VENV)/.dev $(VENV)/.bench $(VENV)/.fuzz $(VENV)/.docs: $(INSTALL_INPUTS)
	@echo 'installing shmbus[$(EXTRAS)] into $(VENV) (the first time downloads PyTorch: minutes)'
	@$(PIP) 'setuptools>=77' 'numpy>=2.0'
	@$(PIP) --no-build-isolation --editable '.[$(EXTRAS)]'
	@touch $@

# --- contenders of the benchmark whose packages would change other pins; one environment each

CONTENDERS := .venv-contenders
CONTENDER_LISTS := $(wildcard bench/contenders/environments/*.txt)
bench-contenders: $(CONTENDER_LISTS:bench/contenders/environments/%.txt=$(CONTENDERS)/%/.done) ## Make the environments of Ray, TransferQueue and Atropos

$(CONTENDERS)/%/.done: bench/contenders/environments/%.txt constraints.txt
	@echo 'making $(@D) with $(PYTHON): minutes, and gigabytes where PyTorch comes with CUDA'
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt -r $<
	@touch $@

# --- strict builds of the C sources, and the C tests of the ring

.PHONY: check-c sanitize-c sanitize-python strict-c
check-c: strict-c

# Through setup.py, which owns the flags, with each installed compiler, with and without debug code.
COMPILERS := $(or $(strip $(foreach cc,gcc clang,$(if $(shell command -v $(cc)),$(cc)))),$(CC))
STRICT := $(foreach debug,0 1,$(COMPILERS:%=strict-$(debug)-%))
.PHONY: $(STRICT)
strict-c: $(STRICT)
$(STRICT): strict-%: $(VENV)/.dev
	@echo "compiling with warnings as errors, SHMBUS_DEBUG-compiler: $*"
	@CC=$(patsubst 0-%,%,$(patsubst 1-%,%,$*)) SHMBUS_DEBUG=$(firstword $(subst -, ,$*)) \
	    SHMBUS_WERROR=1 SHMBUS_SANITIZE= $(BIN)/python setup.py \
	    --quiet build_ext --force --build-temp build/strict/$*/objects --build-lib build/strict/$*

# $(1): name of a variant; $(2): compiler and flags. What all tests link is compiled once.
define c_builds
.PRECIOUS: build/c/$(1)/core/%.o
build/c/$(1)/core/%.o: %.c $(C_HEADERS) Makefile
	@mkdir -p $$(@D)
	@echo 'compiling $$@'; $(2) -c -o $$@ $$<

build/c/$(1)/%: tests/c/%.c $(C_TESTED:%.c=build/c/$(1)/core/%.o) $(wildcard tests/c/*.h)
	$(2) -o $$@ $$< $$(filter %.o,$$^) -Wl,--as-needed -lrt
endef

# $(1), $(2): the same; $(3): target that runs its tests; $(4): the tests.
define c_test_rules
$(call c_builds,$(1),$$(CC) $$(C_STRICT) $(2))

.PHONY: run-c-$(1)
run-c-$(1): $(addprefix build/c/$(1)/,$(4))
	@for test in $$^; do \
	    echo "running $$$$test"; \
	    timeout $$(C_TEST_SECONDS) $$$$test < /dev/null || \
	        { status=$$$$?; echo "$$$$test: exit status $$$$status" >&2; exit 1; }; \
	done

$(3): run-c-$(1)
endef

$(eval $(call c_test_rules,plain,-O2,check-c,$(C_TESTS)))
$(eval $(call c_test_rules,asan,-O1 -g -DSHMBUS_DEBUG=1 -fno-omit-frame-pointer \
    -fsanitize=address$(comma)undefined -fno-sanitize-recover=undefined,sanitize-c,$(C_TESTS)))
$(eval $(call c_test_rules,tsan,-O1 -g -DSHMBUS_DEBUG=1 -fsanitize=thread,sanitize-c,$(UNSTEPPED_TESTS)))

# Fuzzing (tests/fuzz): libFuzzer and atheris find cases; any compiler can replay the kept ones.
# Findings of a run lie in build/fuzz/found; a case worth keeping goes to tests/fuzz/corpus.
FUZZ_TARGETS := header record block segment retry_table declared_schema patch
FUZZ_PYTHON := decoders control snapshot
FUZZERS := $(patsubst %,build/fuzz/fuzz_%,$(FUZZ_TARGETS))
MINUTES ?= 4
FUZZ_SECONDS ?= $$(( $(MINUTES) * 60 / $(words $(FUZZ_TARGETS) $(FUZZ_PYTHON)) ))
FUZZ_OPTIONS = -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix=build/fuzz/found/
FUZZER := clang $(C_STRICT) -D_GNU_SOURCE= -O1 -g -fsanitize=address,undefined \
    -fno-sanitize-recover=undefined
REPLAY = $(CC) $(C_STRICT) -D_GNU_SOURCE= -DFUZZ_REPLAY -O1 -g -fsanitize=address,undefined \
    -fno-sanitize-recover=undefined
.PRECIOUS: build/fuzz/objects/%.o build/fuzz/replay/%.o
build/fuzz/objects/%.o: %.c $(C_HEADERS) Makefile
	@mkdir -p $(@D)
	@echo 'compiling $@'; $(FUZZER) -fsanitize=fuzzer-no-link -c -o $@ $<
build/fuzz/replay/%.o: %.c $(C_HEADERS) Makefile
	@mkdir -p $(@D)
	@echo 'compiling $@'; $(REPLAY) -c -o $@ $<
build/fuzz/fuzz_%: tests/fuzz/fuzz_%.c tests/fuzz/fuzz.h $(C_TESTED:%.c=build/fuzz/objects/%.o)
	$(FUZZER) -fsanitize=fuzzer -o $@ $< $(filter %.o,$^)

.PHONY: check-fuzz fuzz-c fuzz-python
fuzz-c: $(FUZZERS)
	@for target in $(FUZZ_TARGETS); do \
	    mkdir -p build/fuzz/corpus/$$target build/fuzz/found; \
	    build/fuzz/fuzz_$$target $(FUZZ_OPTIONS) build/fuzz/corpus/$$target \
	        tests/fuzz/corpus/$$target || exit 1; \
	done
fuzz-python: $(VENV)/.fuzz
	@for target in $(FUZZ_PYTHON); do \
	    mkdir -p build/fuzz/corpus/$$target build/fuzz/found; \
	    $(BIN)/python tests/fuzz/fuzz_$$target.py $(FUZZ_OPTIONS) build/fuzz/corpus/$$target \
	        tests/fuzz/corpus/$$target || exit 1; \
	done
check-c: check-fuzz
check-fuzz: $(patsubst %,build/fuzz/replay_%,$(FUZZ_TARGETS))
	@for target in $(FUZZ_TARGETS); do \
	    build/fuzz/replay_$$target tests/fuzz/corpus/$$target/* || exit 1; \
	done
build/fuzz/replay_%: tests/fuzz/fuzz_%.c tests/fuzz/fuzz.h $(C_TESTED:%.c=build/fuzz/replay/%.o)
	$(REPLAY) -o $@ $< $(filter %.o,$^) -Wl,--as-needed -lrt

# The explorer (tests/model) compiles a subject's own sources with their shared accesses routed
# through a scheduler. `make check` runs its short form and finds eight planted bugs.
SUBJECTS := ring pool channel
SEEDS := $(sort $(wildcard $(SUBJECTS:%=tests/model/%/seeds/*.sed)))
SHORT_SEEDS := $(patsubst %,tests/model/%.sed,\
    $(addprefix ring/seeds/,timeout_reclaim missing_release link_at_wrap unchecked_claim) \
    $(addprefix pool/seeds/,unlocked_lease wrong_order) \
    $(addprefix channel/seeds/,early_ack no_second_count))
$(SUBJECTS:%=build/explore/%/explore): build/explore/%/explore: $(C_HEADERS) $(RING_SOURCES) \
		$(wildcard shmbus_ext/pool/* shmbus_ext/channel/* tests/model/* $(SUBJECTS:%=tests/model/%/*)) \
		tests/c/support.h
	CC='$(CC)' sh tests/model/build.sh $* shmbus_ext $(@D) -O2

# Each of these has a directory of its own.
EXPLORERS := strong weak pool channel
EXPLORE_strong := ring/explore --strong
EXPLORE_weak := ring/explore --weak
EXPLORE_pool := pool/explore
EXPLORE_channel := channel/explore --states 100000
.PHONY: check-explore $(EXPLORERS:%=explore-%)
check-c: check-explore
check-explore: $(EXPLORERS:%=explore-%) $(SHORT_SEEDS:%=found-%)
explore-strong explore-weak: build/explore/ring/explore
explore-pool: build/explore/pool/explore
explore-channel: build/explore/channel/explore
$(EXPLORERS:%=explore-%): explore-%:
	build/explore/$(EXPLORE_$*)

.PHONY: $(SEEDS:%=found-%)
$(SEEDS:%=found-%): found-%:
	@CC='$(CC)' sh tests/model/seed.sh $*

$(eval $(call c_builds,valgrind,$$(CC) $$(C_STRICT) -O1 -g))
$(eval $(call c_builds,aarch64,aarch64-linux-gnu-gcc $$(C_STRICT) -O2 -static))

# Runs the suite in a copy of the tree, so that the extension of the checkout stays a plain one. The
# sanitizer's library has to be loaded first, with libstdc++. Leaks are not reported, since the
# interpreter frees much only at the end of the process. ASan reports to files, so that reports of
# child processes count too. UBSan reports to stderr only, so pytest does not capture it.
SANITIZED := build/sanitized
SANITIZED_TREE := $(wildcard shmbus shmbus_ext trainer_adapter bench tests examples docs .ci \
    setup.py pyproject.toml MANIFEST.in Makefile constraints.txt LICENSE *.md)
SANITIZER_REPORTS := $(CURDIR)/$(SANITIZED)/sanitizer-report
sanitize-python: $(VENV)/.dev
	@rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	@cp -R $(SANITIZED_TREE) $(SANITIZED)/ && rm -f $(SANITIZED)/shmbus_ext/*.so
	cd $(SANITIZED) && SHMBUS_SANITIZE=address,undefined SHMBUS_DEBUG=1 \
	    $(BIN)/python setup.py --quiet build_ext --inplace
	cd $(SANITIZED) && status=0; \
	    LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so.6)" \
	    ASAN_OPTIONS=detect_leaks=0:log_path=$(SANITIZER_REPORTS) \
	    UBSAN_OPTIONS=print_stacktrace=1 SHMBUS_TEST_PATIENCE=4 \
	    PYTHONMALLOC=malloc PYTHONPATH=$(CURDIR)/$(SANITIZED) \
	    $(BIN)/pytest $(DISTRIBUTED) -p no:cacheprovider --capture=sys -o timeout=600 \
	        -o faulthandler_timeout=1200 $(ARGS) || status=1; \
	    for report in $(SANITIZER_REPORTS).*; do \
	        [ -e "$$report" ] || continue; \
	        cat "$$report" >&2; status=1; \
	    done; \
	    exit $$status
