# All tasks of the project. Needs make and Python 3.11 or later; everything else goes into .venv.
#
#   make demo     train real digits through two servers and two workers on this machine
#   make test     all checks, unit and property tests, the contract of channels, some seeds of each simulation, and
#                 eight real runs: 5 minutes on two cores, once installed and compiled
#   make clusters
#                 the tests with connections and processes: clients, links, collectives, launchers, engines, faults,
#                 snapshots, monitoring, devices, compression, examples
#   make frameworks
#                 the tests that train by PyTorch, Hugging Face, Lightning, JAX and Ray
#   make check    lint and types (make lint), drift of the generated stubs, tidiness, the documents (no training)
#   make docs     the documents as a site in .site, with warnings as errors and all links checked
#   make verify   everything, in about an hour and a half: test, clusters, frameworks, long, torch-suite, sim, chaos,
#                 fuzz, bench. A failed part stops no other; the end is one table. Its default numbers are smaller than those of sim and chaos
#                 by themselves; pass others as in
#                 make verify KILLS=100 INTERRUPTS=125 ROUNDS=10000
#   make long     the tests that only widen others or take too long, and hypothesis with more examples
#   make torch-suite
#                 PyTorch's own tests of torch.distributed on psdist and on gloo: rewrites
#                 docs/internals/torch-suite.md. Their source is a Debian package; without it only the tests of
#                 PyTorch's wheel run. After an interruption, python -m tests.torch_suite --resume runs the rest
#   make sim      10,000 simulated runs with faults (SEEDS=n FIRST=n), 10,000 of ordinary life (ORDINARY_SEEDS=n), 5,000 of
#                 scripts with several parameter sets (SETS_SEEDS=n), 500 with snapshots (SNAPSHOT_SEEDS=n), 500 that lose
#                 the scheduler's store or snapshots (LOST_SEEDS=n), 500 that write weights (WRITES_SEEDS=n), 10,000 of groups
#                 of collectives (GROUPS_SEEDS=n), 10,000 with two schedulers (STANDBY_SEEDS=n), each fault of a storage,
#                 and each safeguard removed in turn
#   make chaos    faults on real processes, each promise with its figure, in about half an hour (KILLS=n of each kind,
#                 INTERRUPTS=n of each kind, ROUNDS=n of barriers, GROUP_ROUNDS=n of lost ranks, SCHEDULES=n of calls and
#                 faults in groups, from the seed FIRST=n)
#   make fuzz     10 million random and mutated payloads for each kind of segment (INPUTS=n), and with checks of bounds;
#                 100,000 calls of every RPC and as many inputs at every port of live processes (CALLS=n), with and
#                 without TLS; the calls over TLS by every role
#   make bench    psdist beside its peers, in some minutes: rewrites docs/performance.md (--full: BENCH=--full)
#   make proto    regenerate psdist/v1 from proto/
#   make man      manual pages of all commands in build/man
#   make sync     regenerate the synchronous API (sync_client.py, sync_group.py) from the asyncio API
#   make api      record the public API (names and signatures) in tests/compat/api.txt
#   make updates  regenerate psdist_server/kernels/updates.py from the optimizers' arithmetic
#   make kernels  compile the kernels of servers, once; other targets do it when they need them
#   make clean    remove everything that these targets created

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
INSTALL = $(BIN)/python .ci/install.py
# Otherwise each of the five processes of the first run compiles the modules, which takes it 2 s.
BYTECODE = $(BIN)/python -m compileall -q psdist servers
# Runs a silent command with a description, behind which come dots, one every two seconds.
WITH_DOTS = @announced() { printf %s "$$1"; shift; "$$@" & work=$$!; \
	while kill -0 $$work 2>/dev/null; do sleep 2; printf .; done & dots=$$!; \
	wait $$work; status=$$?; kill $$dots 2>/dev/null; echo; return $$status; }; announced
PYTEST := $(BIN)/python -m pytest
# Three processes on two cores: some tests wait for leases and for other processes. In the order of the folders: files
# with few, long tests come before those with many short ones. A hanging test ends its process, which ends the run.
PYTEST_PARALLEL := $(PYTEST) -n 3 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
# The variable turns off an advertisement of the theme. Without messages (--quiet) warnings would not be errors.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Test dependency only: the optimizers are compared with torch.optim. PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS in the
# environment can point pip to a build without CUDA. It is installed first, as test tools would bring another.
TORCH := torch==2.13.0

# Of each kind, at most; make verify has its own numbers, in tests/verify.py.
KILLS ?= 100
INTERRUPTS ?= 25
ROUNDS ?= 2000
GROUP_ROUNDS ?= 10
SCHEDULES ?= 100
SEEDS ?= 10000
ORDINARY_SEEDS ?= 10000
SETS_SEEDS ?= 5000
SNAPSHOT_SEEDS ?= 500
LOST_SEEDS ?= 500
WRITES_SEEDS ?= 500
GROUPS_SEEDS ?= 10000
STANDBY_SEEDS ?= 10000
INPUTS ?= 10000000
CALLS ?= 100000
FIRST ?= 0

# Each target starts many processes that import the same modules.
unexport PYTHONDONTWRITEBYTECODE

PROTOS := $(wildcard proto/psdist/v1/*.proto)
# The tests of make check.
CHECKS := tests/test_tidy.py tests/test_structure.py tests/test_prose.py tests/test_proto.py

.PHONY: demo kernels test clusters frameworks check lint docs verify long torch-suite sim chaos fuzz bench proto man sync api updates clean
.DEFAULT_GOAL := test

# --- environment: the demo needs neither torch nor linters, and does not wait for them -------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "psdist needs Python 3.11 or later: make PYTHON=python3.11")'
	$(WITH_DOTS) "creating $(VENV)" $(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@$(INSTALL) "psdist and what it needs into $(VENV), about 160 MB" --editable '.[examples]'
	@$(BYTECODE)
	@touch $@

$(VENV)/.dev: pyproject.toml Makefile | $(BIN)/python
	@$(INSTALL) "PyTorch into $(VENV)" $(TORCH)
	@$(INSTALL) "psdist and what its tests need into $(VENV), about 1 GB" --editable '.[examples,dev]'
	@$(BYTECODE)
	@touch $@ $(VENV)/.installed

# --- tasks -----------------------------------------------------------------------------------------------------------

demo: $(VENV)/.installed
	$(BIN)/psdist run --nservers 2 --nproc-per-node 2 examples/digits.py --compare

# Otherwise each of some hundred servers would start to compile beside its test, and end before that is done.
kernels: $(VENV)/.installed
	$(WITH_DOTS) "compiling kernels, unless they are in the cache" $(BIN)/python -m psdist_server.kernels

test: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j 2 kernels lint docs
	$(PYTEST_PARALLEL) -m "not long and not clusters and not frameworks"

clusters: $(VENV)/.dev kernels
	$(PYTEST_PARALLEL) -m "clusters and not long"

frameworks: $(VENV)/.dev kernels
	$(PYTEST_PARALLEL) -m "frameworks and not long"

check: lint docs
	$(PYTEST) -q $(CHECKS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.dev
	$(MKDOCS)

verify: $(VENV)/.dev
	$(BIN)/python -m tests.verify

long: $(VENV)/.dev kernels
	$(PYTEST) -n 2 --dist loadfile -m long tests --ignore tests/chaos
	$(PYTEST) -n 2 --dist loadfile --hypothesis-profile=full tests/property

torch-suite: $(VENV)/.dev kernels
	$(BIN)/python -m tests.torch_suite

man: $(VENV)/.dev
	$(BIN)/python -m tests.man_pages build/man

proto: $(VENV)/.dev
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS:proto/%=%)

sync: $(VENV)/.dev
	$(BIN)/python -m tests.sync_client

api: $(VENV)/.dev
	$(BIN)/python -m tests.public_api

updates: $(VENV)/.dev
	$(BIN)/python -m tests.kernel_wrappers

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.report $(BENCH)

chaos: $(VENV)/.dev kernels
	INTERRUPTS=$(INTERRUPTS) ROUNDS=$(ROUNDS) GROUP_ROUNDS=$(GROUP_ROUNDS) \
	SCHEDULES=$(SCHEDULES) FIRST=$(FIRST) $(PYTEST) -q tests/chaos
	$(BIN)/python -m tests.chaos --suite --kills $(KILLS)

sim: $(VENV)/.dev kernels
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST)
	$(BIN)/python -m tests.simulation --ablations
	$(BIN)/python -m tests.simulation ordinary --seeds $(ORDINARY_SEEDS) --first $(FIRST)
	$(BIN)/python -m tests.simulation ordinary --ablations
	$(BIN)/python -m tests.simulation sets --seeds $(SETS_SEEDS) --first $(FIRST)
	$(BIN)/python -m tests.simulation sets --ablations
	$(BIN)/python -m tests.simulation snapshots --seeds $(SNAPSHOT_SEEDS) --first $(FIRST)
	$(BIN)/python -m tests.simulation snapshots --faults
	$(BIN)/python -m tests.simulation snapshots --ablations
	$(BIN)/python -m tests.simulation lost --seeds $(LOST_SEEDS) --first $(FIRST)
	$(BIN)/python -m tests.simulation lost --ablations
	$(BIN)/python -m tests.simulation writes --seeds $(WRITES_SEEDS) --first $(FIRST)
	$(BIN)/python -m tests.simulation writes --ablations
	$(BIN)/python -m tests.simulation groups --seeds $(GROUPS_SEEDS) --first $(FIRST)
	$(BIN)/python -m tests.simulation groups --ablations
	$(BIN)/python -m tests.simulation standby --seeds $(STANDBY_SEEDS) --first $(FIRST)
	$(BIN)/python -m tests.simulation standby --ablations

# Numba's cache does not tell kernels with checks of bounds from those without.
fuzz: $(VENV)/.dev kernels
	$(BIN)/python -m tests.fuzz --inputs $(INPUTS)
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=.fuzz $(BIN)/python -m tests.fuzz --inputs $$(($(INPUTS) / 100)) --seed 1
	$(BIN)/python -m tests.fuzz.rpcs --calls $(CALLS)
	$(BIN)/python -m tests.fuzz.rpcs --calls $$(($(CALLS) / 10)) --wild
	$(BIN)/python -m tests.fuzz.rpcs --calls $(CALLS) --tls
	$(BIN)/python -m tests.fuzz.ports --inputs $(CALLS)
	$(BIN)/python -m tests.fuzz.ports --inputs $(CALLS) --tls
	$(BIN)/python -m tests.fuzz.etcd --inputs $(CALLS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis psdist-runs .bench .fuzz .site .torch-suite
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
