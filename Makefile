# Bookends: `make` builds, `make run` checks and times, `make test` tests; `make help` lists all targets.
# No configuration is needed: with nvcc and a GPU it builds for that GPU, otherwise for the CPU with the C++ compiler.

KERNELS := encoder_forward encoder_backward embedding_lookup embedding_lookup_backward embedding_update classifier_fused lm_head
PROGRAMS := $(basename $(notdir $(wildcard dev/test/*.cu)))
HEADERS := $(wildcard *.h parts/*.h dev/harness/*.h dev/lib/*.h dev/test/*.h)
VERSION := $(shell awk '$$2 == "BK_VERSION" { printf "%d.%d.%d", $$3 / 10000, $$3 / 100 % 100, $$3 % 100 }' dev/lib/bookends.h)
MAJOR := $(firstword $(subst ., ,$(VERSION)))
PREFIX ?= /usr/local

NVCC := $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -m 1 '^GPU')
DEVICE ?= $(if $(and $(NVCC),$(GPU)),cuda,cpu)
ifeq ($(filter cuda cpu,$(DEVICE)),)
  $(error DEVICE=$(DEVICE): it is cuda or cpu)
endif
ifneq ($(filter-out address undefined thread,$(SANITIZE))$(word 2,$(SANITIZE)),)
  $(error SANITIZE=$(SANITIZE): it is address, undefined or thread)
endif

BUILD ?= build/$(DEVICE)$(addprefix -,$(SANITIZE))
COMMIT ?= $(or $(shell git describe --always --dirty --abbrev=12 2>/dev/null),unknown)
WARNINGS := -Wall -Wextra

ifeq ($(DEVICE),cuda)
  # ARCHS="80 90": the compute capabilities of the build. The default: those of the GPUs that nvidia-smi lists.
  # sm_90 is built as sm_90a: the same GPU, with its architecture-specific instructions, which -arch=native excludes.
  SMI := nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null
  FOR := $(or $(ARCHS),$(shell $(SMI) | sed -nE 's/^([89]|[1-9][0-9])\.([0-9])$$/\1\2/p' | sort -u))
  gencode = -gencode=arch=compute_$(1:90=90a),code=sm_$(1:90=90a)
  ARCH_FLAGS := $(or $(foreach a,$(FOR),$(call gencode,$(a))),-arch=native)
  COMPILE := $(or $(NVCC),nvcc) -std=c++17 -O3 -lineinfo $(ARCH_FLAGS) -Xcompiler=-fPIC $(addprefix -Xcompiler=,$(WARNINGS))
  LINK := $(or $(NVCC),nvcc) $(ARCH_FLAGS)
  DYNAMIC :=
  SOURCE :=
  RUNTIME :=
else
  # The CPU device: the sources pass through a sed script into $(BUILD)/src and compile as C++ (see dev/cpu).
  # -Wno-psabi: suppresses g++'s note that parameters with a tensor map's alignment were passed differently before 4.6.
  SANITIZERS := $(addprefix -fsanitize=,$(SANITIZE)) $(if $(SANITIZE),-fno-omit-frame-pointer -fno-sanitize-recover=all)
  COMPILE := $(CXX) -std=c++17 -O2 -g1 -pthread -fPIC $(WARNINGS) -Wno-unknown-pragmas -Wno-psabi $(SANITIZERS) -Idev/cpu
  LINK := $(CXX) -pthread $(SANITIZERS)
  DYNAMIC := -rdynamic
  SOURCE := $(BUILD)/src/
  RUNTIME := $(BUILD)/device.o
  # The CPU device describes CUDA's synchronisation to the thread sanitizer (dev/cpu/tsan.h), so it is not instrumented.
  $(BUILD)/device.o: private COMPILE += $(if $(filter thread,$(SANITIZE)),-fno-sanitize=thread -DCPU_THREAD_SANITIZER)
endif
LIBS := -ldl
# The library has one object per kernel family, so that a program links only the families that it calls. The pkg-config
# file lists the other libraries that a program needs with the static library.
LIBRARY := $(patsubst %.cu,$(BUILD)/%.o,$(wildcard dev/lib/*.cu))
SHARED := -shared -Xlinker -soname=libbookends.so.$(MAJOR) -Xlinker --version-script=dev/lib/exports.map
CUDA_LIBS = -L$(patsubst %/bin/nvcc,%/lib64,$(realpath $(NVCC))) -lcublasLt -lcudart_static -lrt
STATIC_LIBS = $(if $(filter cuda,$(DEVICE)),$(CUDA_LIBS)) $(SANITIZERS) -lstdc++ -lm -ldl -lpthread

# Binaries with matrix products need cuBLASLt; the CPU device has its own.
PRODUCTS := $(BUILD)/lm_head $(BUILD)/test/launchers_lm_head $(BUILD)/test/threads $(BUILD)/libbookends.so
ifeq ($(DEVICE),cuda)
  $(PRODUCTS): LIBS += -lcublasLt
else
  $(PRODUCTS) $(BUILD)/libbookends.a: $(BUILD)/cublasLt.o
endif

# Python for the tests: $(PYTHON) if it has the required packages, otherwise a virtual environment in build/venv.
PYTHON ?= python3
TEST_PYTHON := $(shell $(PYTHON) -c 'import allpairspy, numpy, pytest, xdist' 2>/dev/null && echo $(PYTHON) || echo build/venv/bin/python)

# Number of tests that run at the same time: the number of cores; fewer on a GPU, since they share its memory.
WORKERS := $(if $(filter cuda,$(DEVICE)),4,auto)

# The default number of jobs is the number of cores.
ifeq ($(filter -j% --jobserver%,$(MAKEFLAGS)),)
  MAKEFLAGS += -j$(or $(shell nproc 2>/dev/null),1)
endif

.DEFAULT_GOAL := all
.PHONY: all run test test-python lib install package libraries programs binaries warnings results plots profile sass clean help FORCE $(KERNELS)
.DELETE_ON_ERROR:
.SECONDARY:

all: $(KERNELS) ## builds all kernels' binaries, for the device found (DEVICE=cpu|cuda, ARCHS="80 90", SANITIZE=address|undefined|thread)

help: ## prints this list
	@sed -n 's/^\([A-Za-z$$()_-]*\):[^#]*## /\1 /p' $(firstword $(MAKEFILE_LIST)) | sed 's/^$$(KERNELS)/KERNEL/; s/($$(KERNELS))/($(KERNELS))/' | \
	    while read -r name text; do printf '  make %-10s %s\n' "$$name" "$$text"; done

# Makes $(1) at the top level a link to $(2), with a message if it was a link to another build.
link = was=$$(readlink $(1)); [ -z "$$was" ] || [ "$$was" = $(2) ] || echo "./$(1) is now $(2) (was $$was)"; ln -sf $(2) $(1)

$(KERNELS): %: $(BUILD)/% ## builds one kernel's binary ($(KERNELS)); ./KERNEL is a link to the last device built
	@$(call link,$@,$<)

lib: $(BUILD)/libbookends.a $(BUILD)/libbookends.so ## builds libbookends.a and libbookends.so, for dev/lib/bookends.h
	@$(call link,libbookends.a,$(BUILD)/libbookends.a)
	@$(call link,libbookends.so,$(BUILD)/libbookends.so)
	@$(call link,libbookends.so.$(MAJOR),$(BUILD)/libbookends.so)

# DESTDIR is prepended to every path that is written, for packages.
install: $(BUILD)/libbookends.a $(BUILD)/libbookends.so ## installs the library, its header and a pkg-config file to PREFIX=/usr/local (DESTDIR=)
	install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/lib/pkgconfig
	install -m 644 dev/lib/bookends.h $(DESTDIR)$(PREFIX)/include
	install -m 644 $(BUILD)/libbookends.a $(DESTDIR)$(PREFIX)/lib
	install -m 755 $(BUILD)/libbookends.so $(DESTDIR)$(PREFIX)/lib/libbookends.so.$(VERSION)
	ln -sf libbookends.so.$(VERSION) $(DESTDIR)$(PREFIX)/lib/libbookends.so.$(MAJOR)
	ln -sf libbookends.so.$(MAJOR) $(DESTDIR)$(PREFIX)/lib/libbookends.so
	sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|; s|@PRIVATE@|$(strip $(STATIC_LIBS))|' dev/lib/bookends.pc.in \
	    > $(DESTDIR)$(PREFIX)/lib/pkgconfig/bookends.pc

# Copies the library and build.json (version, device, architectures, commit, compiler) into the Python package. setup.py
# calls this target.
RECORD := {"version": "$(VERSION)", "device": "$(DEVICE)", "architectures": "$(if $(filter cuda,$(DEVICE)),$(or $(FOR),native),cpu)", \
    "commit": "$(COMMIT)", "compiler": "$(firstword $(filter-out ccache,$(COMPILE)))"}
PACKAGE ?= python/bookends
package: $(BUILD)/libbookends.so $(BUILD)/build.json
	install -d $(PACKAGE)
	install -m 755 $(BUILD)/libbookends.so $(PACKAGE)
	install -m 644 $(BUILD)/build.json $(PACKAGE)

run: all ## checks and times every version of every kernel on real text; prints a table for each kernel
	@rm -f $(BUILD)/run.jsonl
	$(if $(filter cpu,$(DEVICE)),@echo "The CPU device runs the kernels: the times say nothing about a GPU."; echo)
	@status=0; for kernel in $(KERNELS); do \
	    ./$$kernel all --brief --tokens dev/data/primer.bin --json $(BUILD)/run.jsonl || status=$$?; echo; \
	done; echo "All measurements: $(BUILD)/run.jsonl"; exit $$status

# libraries, programs: without links at the top level. binaries: these, and the programs of the tests.
libraries: $(BUILD)/libbookends.a $(BUILD)/libbookends.so
programs: $(KERNELS:%=$(BUILD)/%)
binaries: libraries programs $(BUILD)/build.json $(PROGRAMS:%=$(BUILD)/test/%)

test: binaries $(filter build/%,$(TEST_PYTHON)) ## runs the tests; TESTS="-k 'shapes or types'" passes options to pytest
	BOOKENDS_BUILD=$(BUILD) BOOKENDS_DEVICE=$(DEVICE) SANITIZE=$(SANITIZE) CXX="$(CXX)" \
	    $(TEST_PYTHON) -m pytest -q -n $(WORKERS) dev/test $(TESTS)

test-python: $(BUILD)/libbookends.so $(BUILD)/build.json build/venv-torch/bin/python ## runs the Python package's tests with torch, which it installs into build/venv-torch (4.6 GB)
	BOOKENDS_BUILD=$(BUILD) BOOKENDS_DEVICE=$(DEVICE) SANITIZE=$(SANITIZE) CXX="$(CXX)" \
	    build/venv-torch/bin/python -m pytest -q -rs -n 2 dev/test/test_python.py $(TESTS)

# More warnings than in a build, as errors, from g++ and, if it is found, clang++. Produces no code.
STRICT := -Wformat=2 -Wformat-security -Wshadow -Werror -fsyntax-only
CHECKED := $(wildcard *.cu dev/lib/*.cu dev/test/*.cu)
COMPILERS := '$(CXX)' $(if $(findstring clang,$(CXX)),,$(shell command -v clang++))
warnings: $(HEADERS:%=$(SOURCE)%) $(CHECKED:%=$(SOURCE)%) ## checks every source of the CPU device with more warnings, as errors
	$(if $(filter cuda,$(DEVICE)),@echo "make $@: needs DEVICE=cpu" >&2; exit 1)
	@for compiler in $(COMPILERS); do \
	    for file in $(CHECKED:%=$(SOURCE)%) $(wildcard dev/cpu/*.cc); do \
	        $$compiler $(subst $(CXX) -std,-std,$(COMPILE)) $(STRICT) -x c++ $$file || exit 1; \
	    done; \
	done

results: ## measures the README's shapes on this GPU into dev/results; writes the README's tables and pictures
	scripts/measure.sh
	scripts/tables.py
	$(MAKE) plots

plots: $(filter build/%,$(TEST_PYTHON)) ## draws the README's pictures from dev/results (needs matplotlib)
	$(TEST_PYTHON) scripts/plot.py dev/results/nvidia-h200/*.jsonl -o dev/results/nvidia-h200 --only ladder,memory --format svg

# The kernel of profile and sass, which need a build for a GPU.
K ?= $(firstword $(KERNELS))
on_gpu = $(if $(filter cuda,$(DEVICE)),$(1),@echo "make $@: needs DEVICE=cuda" >&2; exit 1)

profile: $(if $(filter cuda,$(DEVICE)),$(BUILD)/$(K)) ## K=encoder_forward V=3: Nsight Compute's report on this version (needs ncu)
	$(call on_gpu,ncu --set full --kernel-id ::regex:^$(K)_:1 --clock-control none $< $(V) --bench --repeat 1 $(if $(filter lm_head,$(K)),,--block-size 256))

sass: $(if $(filter cuda,$(DEVICE)),$(BUILD)/$(K)) ## K=encoder_forward: prints the machine code of its kernels (needs cuobjdump)
	$(call on_gpu,cuobjdump --dump-sass $<)

clean: ## removes all build outputs
	rm -rf build .pytest_cache $(KERNELS) libbookends.a libbookends.so libbookends.so.*

# ---- rules ----

# Writes the file only if its text changes, so that dependent files are rebuilt only then.
write_if_changed = @mkdir -p $(@D); printf '%s\n' '$(1)' | cmp -s - $@ || printf '%s\n' '$(1)' > $@
$(BUILD)/flags: FORCE
	$(call write_if_changed,$(COMPILE))
$(BUILD)/commit.cc: FORCE
	$(call write_if_changed,extern "C" const char bookends_commit[] = "$(COMMIT)";)

$(BUILD)/build.json: FORCE
	$(call write_if_changed,$(RECORD))

$(BUILD)/commit.o: $(BUILD)/commit.cc $(BUILD)/flags
	$(COMPILE) -c $< -o $@

$(BUILD)/device.o $(BUILD)/cublasLt.o: $(BUILD)/%.o: dev/cpu/%.cc $(BUILD)/flags
	$(COMPILE) -MMD -MP -c $< -o $@

# Writes a temporary file first, since make may build the same file under the name dir/../file at the same time.
$(BUILD)/src/%: % dev/cpu/rewrite.sed
	@mkdir -p $(@D)
	@{ echo '#line 1 "$<"'; sed -f dev/cpu/rewrite.sed $<; } > $@.$$$$ && mv $@.$$$$ $@

$(BUILD)/%.o: $(SOURCE)%.cu $(BUILD)/flags | $(if $(SOURCE),$(HEADERS:%=$(SOURCE)%) $(KERNELS:%=$(SOURCE)%.cu))
	@mkdir -p $(@D)
	$(COMPILE) $(if $(SOURCE),-x c++) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

$(KERNELS:%=$(BUILD)/%): $(BUILD)/%: $(BUILD)/%.o $(BUILD)/commit.o $(RUNTIME)
	$(LINK) $(DYNAMIC) $^ -o $@ $(LIBS)

$(BUILD)/test/%: $(BUILD)/dev/test/%.o $(BUILD)/commit.o $(RUNTIME)
	@mkdir -p $(@D)
	$(LINK) $(DYNAMIC) $^ -o $@ $(LIBS)

$(BUILD)/test/threads: $(BUILD)/libbookends.a

$(BUILD)/libbookends.a: $(LIBRARY) $(RUNTIME)
	rm -f $@
	$(AR) rcs $@ $^

$(BUILD)/libbookends.so: $(LIBRARY) $(RUNTIME) dev/lib/exports.map
	$(LINK) $(SHARED) $(filter %.o,$^) -o $@ $(LIBS)
	@ln -sf $(@F) $@.$(MAJOR)

build/venv-torch/bin/python: python/tests/requirements.txt dev/test/requirements.txt
	$(PYTHON) -m venv build/venv-torch
	build/venv-torch/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

build/venv/bin/python: dev/test/requirements.txt
	$(PYTHON) -m venv build/venv || { echo "make test: needs python3 with venv, or with allpairspy, numpy, pytest and pytest-xdist" >&2; exit 1; }
	build/venv/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

-include $(wildcard $(BUILD)/*.d $(BUILD)/dev/*/*.d)
