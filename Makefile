# Nothing is needed but make and a Python of at least 3.10: all else goes into .venv, at the versions
# of constraints.txt. PYTHON=/path/to/python chooses another interpreter for it.

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PROGRESS := $(BIN)/python .ci/progress
# Three stamps, each on top of the one before: what the first notebook needs in the terminal, what it needs in JupyterLab,
# and what the tests need. Only the last one compiles anything. Beside them, what makes the site of the documentation.
DEMO := .venv/.demo
LAB := .venv/.lab
INSTALLED := .venv/.installed
DOCS := .venv/.docs
FRONT_END := nbtrain/static/sources.sha256
NOTEBOOK := notebooks/01_first_run.ipynb

# Nothing is compiled to bytecode at installation, so it has to be when it is first imported: many containers forbid that,
# and each process of the tests would compile its libraries and its tests anew.
unexport PYTHONDONTWRITEBYTECODE

# A package that cannot be installed leaves its tests out, with a word; where everything has to be there, it is an error.
left_out = { echo '$(1) could not be installed: its tests are left out'; [ -z "$$NBTRAIN_REQUIRE_ALL" ]; }

# The suite in as many processes as ran well side by side, file by file.
PYTEST := $(BIN)/pytest -p no:nbval --numprocesses=$(or $(WORKERS),2) --dist=loadfile --no-loadscope-reorder

.PHONY: help lab demo quick test verify check installed environments compat js pictures reference site gpu bench tables fuzz parity faults soak
.DEFAULT_GOAL := help

help:
	@echo 'make lab    open the first notebook in JupyterLab'
	@echo 'make demo   run the first notebook here in the terminal (another one: NOTEBOOK=notebooks/...)'
	@echo 'make quick  what one runs all the time: style, types, layers, and tests that start no kernel and no ranks'
	@echo 'make test   each promise once, on real kernels and ranks; WORKERS=2. PART=1/8: and an eighth of what make verify adds'
	@echo 'make verify every check and every test that this machine allows; SEED=20991231 plays what was drawn on that day'
	@echo 'make environments  what Colab, Kaggle and other notebooks have, and the libraries of Hugging Face, for their tests'
	@echo 'make compat TORCH=2.15.0 PYTHON=python3.13  tests/compat with another torch; DEEPSPEED=0.19.8; gigabytes in build/'
	@echo 'make js     the front end: built anew of js/, and its tests'
	@echo 'make pictures  those of the documentation, taken anew from a JupyterLab that trains'
	@echo 'make reference  the tables of docs/reference.md, written anew from the options, verbs and strategies'
	@echo 'make site   the documentation as a site, in build/site; a link or an anchor that leads nowhere is an error'
	@echo 'make gpu    what needs a CUDA device, and the tables of lines and strategies on one; STRATEGIES="ddp zero1"'
	@echo 'make bench  the benchmarks; PEERS=1: other ways to several processes from a notebook, and nbtrain, on the same work;'
	@echo '            it fails where nbtrain is not first. ROWS=cell,start PEERS=ipyparallel,ray QUICK=1: a part of it;'
	@echo '            GO_ON=1: the rows that are missing of a run that was ended'
	@echo 'make tables memory and pace of every strategy, the largest that fits; SIZE=10 RANKS="2 4" MEMORY= COPY=FILE'
	@echo 'make fuzz   random notebooks against one process, and random training programs under every strategy;'
	@echo '            EXAMPLES=2000 SEED=0; STRATEGY=fsdp EXAMPLES=1000: training programs under that one; NUMBER=17'
	@echo 'make parity every line that people write under every strategy and option, against one process; all pairs'
	@echo '            of checkpoints; what a rank holds, and what the plan says; SEED=0'
	@echo 'make faults every fault under every strategy and start method; SEED=0'
	@echo 'make soak   hours of a notebook: does anything grow or slow down; MINUTES=60 SEED=0'

lab: $(LAB) $(FRONT_END)
	@echo 'starting JupyterLab with $(NOTEBOOK)'
	@$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(NOTEBOOK)

# Two of the notebooks train under every strategy.
demo: $(if $(filter %03_fsdp_and_deepspeed.ipynb %04_all_strategies.ipynb,$(NOTEBOOK)),$(INSTALLED),$(DEMO))
	@echo 'running $(NOTEBOOK)'
	@$(if $(filter %08_hugging_face.ipynb %10_fine_tuning.ipynb,$(NOTEBOOK)),$(BIN)/python .ci/libraries && PYTHONPATH=$(CURDIR)/build/libraries/hugging_face )\
	    $(BIN)/python .ci/demo $(NOTEBOOK)

quick: check
	$(PYTEST) -m 'not (kernel or lab or ranks or slow or thorough or gpu)'

test: check
	$(if $(PART),PART=$(PART) SEED=$(or $(SEED),0) $(PYTEST),$(PYTEST) -m 'not thorough')

# What is drawn at random is drawn anew every day.
verify: SEED := $(or $(SEED),$(shell date +%Y%m%d))
verify: check
	@echo 'SEED=$(SEED)'
	SEED=$(SEED) $(PYTEST)

check: $(INSTALLED) $(FRONT_END)
	@.ci/system tests
	$(BIN)/ruff check .
	$(BIN)/mypy

installed: $(INSTALLED) $(FRONT_END)

environments: $(INSTALLED)
	@$(BIN)/python .ci/environments
	@$(BIN)/python .ci/libraries

# In an environment of its own: .venv is not needed. Without TORCH it is the newest that was tried.
compat:
	@python3 .ci/compat $(or $(TORCH),newest) $(if $(PYTHON),--python $(PYTHON)) $(if $(DEEPSPEED),--deepspeed $(DEEPSPEED))

js: $(FRONT_END)
	$(BIN)/pytest tests/unit/repository/test_front_end.py

pictures: $(INSTALLED) $(FRONT_END)
	@$(BIN)/python .ci/pictures

reference: $(INSTALLED)
	@$(BIN)/python .ci/reference

# All pages anew: which others there are is in each.
site: $(DOCS)
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet -c docs -d build/site-cache . build/site
	@echo 'build/site/index.html'

gpu: $(INSTALLED)
	$(BIN)/pytest -m gpu
	ON_CARDS=1 STRATEGIES="$(or $(STRATEGIES),ddp fsdp)" $(BIN)/pytest -p no:cacheprovider tests/kernel/test_lines.py tests/kernel/test_parity.py

bench: $(INSTALLED)
ifdef PEERS
	@$(BIN)/python .ci/peers $(if $(filter-out 1,$(PEERS)),$(PEERS))
	@$(BIN)/python -u -m benchmarks.peers $(if $(filter-out 1,$(PEERS)),--peers "$(PEERS)") \
	    $(if $(ROWS),--rows "$(ROWS)") $(if $(QUICK),--quick) $(if $(GO_ON),--go-on)
else
	@for name in $(basename $(notdir $(wildcard benchmarks/bench_*.py))); do $(BIN)/python -m benchmarks.$$name || exit 1; done
endif

tables: $(INSTALLED)
	@$(BIN)/python -u -m benchmarks.tables $(if $(SIZE),--size $(SIZE)) $(if $(RANKS),--ranks $(RANKS)) \
	    $(if $(MEMORY),--memory $(MEMORY)) $(if $(COPY),--copy $(COPY))

fuzz: $(INSTALLED)
	$(if $(STRATEGY),,EXAMPLES=$(or $(EXAMPLES),2000) SEED=$(or $(SEED),0) $(BIN)/pytest tests/ranks/test_fuzz.py)
	$(BIN)/python -u -m tests.fuzz $(if $(STRATEGY),--strategy $(STRATEGY)) --examples $(or $(EXAMPLES),1000) \
	    --seed $(or $(SEED),0) $(if $(NUMBER),--number $(NUMBER))

parity: $(INSTALLED)
	PARITY=all SEED=$(or $(SEED),0) $(BIN)/pytest tests/kernel/test_parity.py tests/kernel/test_sharded_memory.py \
	    tests/ranks/test_checkpoints.py tests/ranks/test_meta_init.py tests/kernel/test_estimates.py \
	    tests/kernel/test_export_notebooks.py

faults: $(INSTALLED)
	FAULTS=all SEED=$(or $(SEED),0) $(BIN)/pytest tests/faults

soak: $(INSTALLED)
	$(BIN)/python -u -m benchmarks.soak $(or $(MINUTES),60) $(or $(SEED),0)

# Bundles js/ anew when it has changed.
$(FRONT_END): hatch_build.py js/package-lock.json $(wildcard js/src/*) | $(LAB)
	@$(PROGRESS) 'bundling the front end (js/)' $(PIP) --no-deps -e .
	@touch $@

# An environment is brought up to date in place when what is wanted has changed; a half-finished one has no stamp.
# Files are compiled to bytecode when they are first imported: pip would compile all of torch first.
$(DEMO): pyproject.toml constraints.txt
	@rm -f $@
	@for python in $(or $(PYTHON),$(BIN)/python python3.13 python3.12 python3.11 python3.10 python3); do \
	    $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue; \
	    $$python -c 'import ensurepip, venv' 2>/dev/null || .ci/system venv; \
	    $$python -c 'import ensurepip, venv' 2>/dev/null && found=$$python && break; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "nbtrain needs Python 3.10 or newer, with its venv module; $(or $(PYTHON),python3) is $$($(or $(PYTHON),python3) --version 2>&1)."; \
	    echo "Install one (on Debian: apt-get install python3-venv), or name it: make PYTHON=/path/to/python3.12"; \
	    exit 1; \
	elif [ "$$found" != $(BIN)/python ]; then \
	    echo "making .venv with $$($$found --version)"; \
	    $$found -m venv --clear .venv; \
	fi
	@NBTRAIN_FRONT_END=no $(PROGRESS) 'installing nbtrain and PyTorch' $(PIP) --no-compile -e '.[notebooks]'
	@touch $@

$(LAB): $(DEMO)
	@rm -f $@
	@NBTRAIN_FRONT_END=no $(PROGRESS) 'installing JupyterLab' $(PIP) --no-compile -e '.[lab]'
	@touch $@

$(DOCS): $(DEMO)
	@rm -f $@
	@NBTRAIN_FRONT_END=no $(PROGRESS) 'installing Sphinx' $(PIP) --no-compile -e '.[docs]'
	@touch $@

$(INSTALLED): $(LAB) .ci/horovod
	@rm -f $@
	@.ci/system compilers
	@NBTRAIN_FRONT_END=no $(PROGRESS) 'installing what the tests need' $(PIP) --no-compile -e '.[test]' wheel setuptools
	@# DeepSpeed's setup looks at the torch that is installed, which an isolated build would not have.
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PROGRESS) 'installing DeepSpeed' $(PIP) --no-build-isolation deepspeed ninja \
	    || $(call left_out,DeepSpeed)
	@# FairScale is there as source only, and its setup, too, wants the wheel and setuptools that are here.
	@$(PROGRESS) 'installing FairScale' $(PIP) --no-build-isolation fairscale || $(call left_out,FairScale)
	@$(PROGRESS) 'installing Horovod (compiled once on a machine, for minutes)' .ci/horovod || $(call left_out,Horovod)
	@# Some files of others are for another Python, and do not compile.
	@$(PROGRESS) 'compiling to bytecode' sh -c '$(BIN)/python -m compileall -qq -j 0 .venv/lib || true'
	@touch $@
