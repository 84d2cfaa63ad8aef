# Each target sets itself up: it makes .venv, installs the project into it with what the target
# needs, and does so again only when the metadata, the pins, the C sources or the switches changed.
#
#   PYTHON   the interpreter that .venv is made with (after a change: make clean)
#   ARGS     passed on to what demo, test and bench run
#   WORKERS  processes that share the test files; 0 for none beside pytest's own, as --pdb needs
#   CC, SHMBUS_DEBUG, SHMBUS_SANITIZE, SHMBUS_WERROR   how the extension is compiled; see setup.py

PYTHON ?= python3
ARGS ?=
WORKERS ?= 2
export SHMBUS_DEBUG SHMBUS_SANITIZE SHMBUS_WERROR

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

# Whole files, so that what a file sets up is set up once and its tests have an order; those of
# processes come first, since they take longest.
DISTRIBUTED = -n $(WORKERS) --dist loadfile --no-loadscope-reorder -p no:benchmark

C_SOURCES := $(sort $(shell find shmbus_ext -name "*.c"))
C_HEADERS := $(sort $(shell find shmbus_ext -name "*.h"))
# The ring alone, as the C tests, the fuzzers and the explorer link it.
RING_SOURCES := $(sort $(wildcard shmbus_ext/ring/*.c))
# A C test is one file with a main of its own, linked with the ring; exit status 0 is success.
C_TESTS := $(patsubst tests/c/%.c,%,$(sort $(wildcard tests/c/*.c)))
C_STRICT := -std=c11 -Wall -Wextra -Wconversion -Werror -pthread -Ishmbus_ext
C_TEST_SECONDS := 300
# Stepping needs ptrace, which qemu-user has not, would take hours under valgrind, and is of one
# thread, in which TSan finds nothing.
UNSTEPPED_TESTS := $(filter-out step_kill,$(C_TESTS))
comma := ,

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two targets that install into one environment must not do it at once.
.NOTPARALLEL:
.PHONY: help demo test check bench bench-calls bench-contenders bench-report explore fuzz soak
.PHONY: kills points versions leaks valgrind cross sanitize clean FORCE

help: ## Show this list
	@echo 'usage: make TARGET [ARGS="..."] [PYTHON=python3.x]'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 20

demo: $(VENV)/.demo ## Train a small policy over the bus, workers and trainer on this machine
	@$(BIN)/shmbus demo $(ARGS)

test: $(VENV)/.dev ## Run the whole test suite
	$(BIN)/pytest $(DISTRIBUTED) $(ARGS)

check: $(VENV)/.dev check-c ## Lint, formatting, strict types, warnings-as-errors C, C tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench ## Measure, and compare with other ways to move a trajectory; make bench ARGS=--full
	@$(BIN)/shmbus bench $(ARGS)

bench-calls: $(VENV)/.bench ## Time the hot calls, comparable over commits; count the C core's instructions
	$(BIN)/pytest -o addopts= --benchmark-columns=min,median,iqr,rounds --benchmark-sort=name bench/calls.py $(ARGS)
	$(BIN)/python -m bench.instructions check

bench-report: $(VENV)/.bench ## Measure everything anew, and put report, plots and README in order
	$(BIN)/shmbus bench --full --output bench/results/two-cores $(ARGS)
	$(BIN)/python -m bench.report bench/results/two-cores --readme README.md

explore: build/explore/plain/explore ## Search the ring's interleavings, deaths included, as deep as stated (half an hour)
	build/explore/plain/explore --deep $(ARGS)
	@for seed in $(EXPLORE_SEEDS); do CC='$(CC)' sh tests/model/seed.sh $$seed || exit 1; done

fuzz: fuzz-c fuzz-python ## Fuzz what reads segment, messages, snapshots, MINUTES in all (needs clang)

# SOAK=soak is the embedded form: no daemon, no ranks. RESTARTS=1000 kills the daemon so often.
SOAK ?= daemon_soak
soak: $(VENV)/.dev ## Daemon, two ranks, eight producers under random faults for MINUTES, then an audit
	$(BIN)/python tests/process/$(SOAK).py soak-$$$$ $$(( $(MINUTES) * 60 )) $(or $(SEED),$$$$) $(RESTARTS)

KILLS ?= 10000
kills: $(VENV)/.dev ## SIGKILL of KILLS producers at random instants
	SHMBUS_TEST_KILLS=$(KILLS) $(BIN)/pytest tests/process/test_death.py -k killed_writers $(ARGS)

points: $(VENV)/.dev ## A death and a stop at every named point of every process, first and later passes
	SHMBUS_TEST_POINTS=all $(BIN)/pytest tests/process/test_failpoints.py $(ARGS)

versions: $(VENV)/.dev ## The trainer side with other torch, transformers, flash-attn (half an hour)
	$(BIN)/python tests/versions.py $(ARGS)

leaks: $(VENV)/.dev ## Count what 10,000 cycles of everything leave behind
	$(BIN)/python tests/process/leaks.py leaks-$$$$ 10000

valgrind: $(addprefix build/c/valgrind/,$(UNSTEPPED_TESTS)) ## Run C tests under valgrind
	@for test in $^; do valgrind -q --error-exitcode=1 --leak-check=full $$test || exit 1; done

cross: $(addprefix build/c/aarch64/,$(UNSTEPPED_TESTS)) ## Build for aarch64 and run C tests under qemu-user
	@for test in $^; do qemu-aarch64 $$test || exit 1; done

sanitize: $(VENV)/.dev sanitize-c sanitize-python ## C and Python tests under ASan, UBSan and TSan

clean: ## Remove the environment and everything that was built
	rm -rf $(VENV) $(CONTENDERS) build dist *.egg-info shmbus_ext/*.so
	rm -rf .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment

$(VENV)/.created:
	@sh .ci/requirements.sh $(PYTHON)
	@echo 'making $(VENV) with $(PYTHON)'
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# Rewritten only where the switches differ from those of the last build.
$(VENV)/.switches: $(VENV)/.created FORCE
	@echo '$(CC) $(SHMBUS_DEBUG) $(SHMBUS_SANITIZE) $(SHMBUS_WERROR)' | cmp -s - $@ || \
	    echo '$(CC) $(SHMBUS_DEBUG) $(SHMBUS_SANITIZE) $(SHMBUS_WERROR)' > $@

INSTALL_INPUTS := pyproject.toml setup.py constraints.txt $(VENV)/.switches \
    $(C_SOURCES) $(C_HEADERS)

$(VENV)/.demo: EXTRAS := demo
$(VENV)/.dev: EXTRAS := dev,train
$(VENV)/.bench: EXTRAS := bench-all,train
$(VENV)/.fuzz: EXTRAS := dev,fuzz

# Editable, so that the sources here are what runs. The build requirements go into the environment
# first, and not into a throwaway one, so that a changed C file needs no network.
$(VENV)/.demo $(VENV)/.dev $(VENV)/.bench $(VENV)/.fuzz: $(INSTALL_INPUTS)
	@echo 'installing shmbus[$(EXTRAS)] into $(VENV) (the first time downloads PyTorch: minutes)'
	@$(PIP) 'setuptools>=77' 'numpy>=2.0'
	@$(PIP) --no-build-isolation --editable '.[$(EXTRAS)]'
	@touch $@

# --- contenders of the benchmark whose packages would change the environment of everybody else

CONTENDERS := .venv-contenders
CONTENDER_LISTS := $(wildcard bench/contenders/environments/*.txt)
bench-contenders: $(CONTENDER_LISTS:bench/contenders/environments/%.txt=$(CONTENDERS)/%/.done) ## Make the environments of Ray, TransferQueue and Atropos

$(CONTENDERS)/%/.done: bench/contenders/environments/%.txt constraints.txt
	@echo 'making $(@D) with $(PYTHON): minutes, and gigabytes where PyTorch comes with CUDA'
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt -r $<
	@touch $@

# --- the C sources, and the ring's own tests

.PHONY: check-c sanitize-c sanitize-python strict-c
check-c: strict-c

# Through setup.py, which owns the flags, with every compiler that is here and with the debug code
# in and out.
strict-c: $(VENV)/.dev
	@for cc in $(or $(strip $(foreach cc,gcc clang,$(if $(shell command -v $(cc)),$(cc)))),$(CC)); do \
	    for debug in 0 1; do \
	        echo "compiling with $$cc, warnings as errors, SHMBUS_DEBUG=$$debug"; \
	        CC=$$cc SHMBUS_WERROR=1 SHMBUS_SANITIZE= SHMBUS_DEBUG=$$debug $(BIN)/python setup.py \
	            --quiet build_ext --force --build-temp build/strict/$$cc-$$debug/objects \
	            --build-lib build/strict/$$cc-$$debug || exit 1; \
	    done; \
	done

# $(1): the name of a variant; $(2): its flags; $(3): the target that runs its tests; $(4): those.
define c_test_rules
build/c/$(1)/%: tests/c/%.c $(RING_SOURCES) $(C_HEADERS) $(wildcard tests/c/*.h) Makefile
	@mkdir -p $$(@D)
	$$(CC) $$(C_STRICT) $(2) -o $$@ $$< $$(RING_SOURCES) -Wl,--as-needed -lrt

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

# Fuzzing (tests/fuzz): libFuzzer and atheris find cases, and any compiler replays those that are
# kept. What a run finds lies in build/fuzz/found; a case worth keeping goes to tests/fuzz/corpus.
FUZZ_TARGETS := header record segment retry_table
FUZZ_PYTHON := decoders control snapshot
FUZZERS := $(patsubst %,build/fuzz/fuzz_%,$(FUZZ_TARGETS))
MINUTES ?= 4
FUZZ_SECONDS ?= $$(( $(MINUTES) * 60 / $(words $(FUZZ_TARGETS) $(FUZZ_PYTHON)) ))
FUZZ_OPTIONS = -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix=build/fuzz/found/
build/fuzz/fuzz_%: tests/fuzz/fuzz_%.c tests/fuzz/fuzz.h $(RING_SOURCES) $(C_HEADERS) Makefile
	@mkdir -p $(@D)
	clang $(C_STRICT) -D_GNU_SOURCE= -O1 -g -fsanitize=fuzzer,address,undefined \
	    -fno-sanitize-recover=undefined -o $@ $< $(RING_SOURCES)

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
build/fuzz/replay_%: tests/fuzz/fuzz_%.c tests/fuzz/fuzz.h $(RING_SOURCES) $(C_HEADERS) Makefile
	@mkdir -p $(@D)
	$(CC) $(C_STRICT) -D_GNU_SOURCE= -DFUZZ_REPLAY -O1 -g -fsanitize=address,undefined \
	    -fno-sanitize-recover=undefined -o $@ $< $(RING_SOURCES) -Wl,--as-needed -lrt

# The explorer (tests/model): the ring's own sources, their shared accesses routed through a
# scheduler. Its short form, and the bugs of the kinds that rings are known for, are checks.
EXPLORE_SEEDS := $(sort $(wildcard tests/model/seeds/*.sed))
EXPLORE_SHORT_SEEDS := $(patsubst %,tests/model/seeds/%.sed,\
    timeout_reclaim missing_release link_at_wrap unchecked_claim)
build/explore/plain/explore: $(RING_SOURCES) $(C_HEADERS) $(wildcard tests/model/*) tests/c/support.h
	CC='$(CC)' sh tests/model/build.sh shmbus_ext/ring $(@D) -O2

.PHONY: check-explore
check-c: check-explore
check-explore: build/explore/plain/explore
	build/explore/plain/explore
	@for seed in $(EXPLORE_SHORT_SEEDS); do CC='$(CC)' sh tests/model/seed.sh $$seed || exit 1; done

build/c/valgrind/%: tests/c/%.c $(RING_SOURCES) $(C_HEADERS) $(wildcard tests/c/*.h) Makefile
	@mkdir -p $(@D)
	$(CC) $(C_STRICT) -O1 -g -o $@ $< $(RING_SOURCES) -Wl,--as-needed -lrt
build/c/aarch64/%: tests/c/%.c $(RING_SOURCES) $(C_HEADERS) $(wildcard tests/c/*.h) Makefile
	@mkdir -p $(@D)
	aarch64-linux-gnu-gcc $(C_STRICT) -O2 -static -o $@ $< $(RING_SOURCES)

# The suite in a copy of the tree, so that the extension in use here stays a plain one. The
# sanitizer's library has to be the first one in a process, and libstdc++ there when it starts;
# leaks are not looked for, since the interpreter leaves much to the end of the process. ASan
# reports to files, so that what a child process did counts too; UBSan knows stderr only, which
# pytest therefore leaves alone.
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
