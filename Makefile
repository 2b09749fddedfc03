# Bookends: `make` builds, `make run` races, `make test` proves; `make help` lists the rest.
# Nothing to configure: with nvcc and a GPU it builds for that GPU, otherwise for the CPU with the C++ compiler alone.

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
  # ARCHS="80 90" builds for those compute capabilities; by default for those of the GPUs at hand, as they tell them.
  # sm_90 is built as sm_90a, which is the same machine and allows its own instructions; -arch=native leaves them out.
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
  # -Wno-psabi: of a parameter aligned as a tensor map is, g++ notes that before 4.6 it was passed in another way.
  SANITIZERS := $(addprefix -fsanitize=,$(SANITIZE)) $(if $(SANITIZE),-fno-omit-frame-pointer -fno-sanitize-recover=all)
  COMPILE := $(CXX) -std=c++17 -O2 -g1 -pthread -fPIC $(WARNINGS) -Wno-unknown-pragmas -Wno-psabi $(SANITIZERS) -Idev/cpu
  LINK := $(CXX) -pthread $(SANITIZERS)
  DYNAMIC := -rdynamic
  SOURCE := $(BUILD)/src/
  RUNTIME := $(BUILD)/device.o
  # The CPU device itself tells the thread sanitizer what CUDA orders (dev/cpu/tsan.h).
  $(BUILD)/device.o: private COMPILE += $(if $(filter thread,$(SANITIZE)),-fno-sanitize=thread -DCPU_THREAD_SANITIZER)
endif
LIBS := -ldl
# The library has an object for each kernel family, so that a program links only what it calls. What a program that links
# the static library needs beside it goes into the pkg-config file.
LIBRARY := $(patsubst %.cu,$(BUILD)/%.o,$(wildcard dev/lib/*.cu))
SHARED := -shared -Xlinker -soname=libbookends.so.$(MAJOR) -Xlinker --version-script=dev/lib/exports.map
CUDA_LIBS = -L$(patsubst %/bin/nvcc,%/lib64,$(realpath $(NVCC))) -lcublasLt -lcudart_static -lrt
STATIC_LIBS = $(if $(filter cuda,$(DEVICE)),$(CUDA_LIBS)) $(SANITIZERS) -lstdc++ -lm -ldl -lpthread

# What multiplies matrices needs cuBLASLt; the CPU device has its own.
PRODUCTS := $(BUILD)/lm_head $(BUILD)/test/launchers_lm_head $(BUILD)/test/threads $(BUILD)/libbookends.so
ifeq ($(DEVICE),cuda)
  $(PRODUCTS): LIBS += -lcublasLt
else
  $(PRODUCTS) $(BUILD)/libbookends.a: $(BUILD)/cublasLt.o
endif

# Python for the tests: the one at hand if it has what they need, else a virtual environment made here.
PYTHON ?= python3
TEST_PYTHON := $(shell $(PYTHON) -c 'import allpairspy, numpy, pytest, xdist' 2>/dev/null && echo $(PYTHON) || echo build/venv/bin/python)

# Tests that run side by side: as many as there are cores, but on a GPU they share its memory.
WORKERS := $(if $(filter cuda,$(DEVICE)),4,auto)

# As many jobs as there are cores, unless make is given -j.
ifeq ($(filter -j% --jobserver%,$(MAKEFLAGS)),)
  MAKEFLAGS += -j$(or $(shell nproc 2>/dev/null),1)
endif

.DEFAULT_GOAL := all
.PHONY: all run test test-python lib install package libraries programs binaries warnings results plots profile sass clean help FORCE $(KERNELS)
.DELETE_ON_ERROR:
.SECONDARY:

all: $(KERNELS) ## every kernel's binary, for the device found (DEVICE=cpu|cuda, ARCHS="80 90", SANITIZE=address|undefined|thread)

help: ## this list
	@sed -n 's/^\([A-Za-z$$()_-]*\):[^#]*## /\1 /p' $(firstword $(MAKEFILE_LIST)) | sed 's/^$$(KERNELS)/KERNEL/; s/($$(KERNELS))/($(KERNELS))/' | \
	    while read -r name text; do printf '  make %-10s %s\n' "$$name" "$$text"; done

# Links $(1) at the top level to $(2), and says so if it was a link to another build.
link = was=$$(readlink $(1)); [ -z "$$was" ] || [ "$$was" = $(2) ] || echo "./$(1) is now $(2) (was $$was)"; ln -sf $(2) $(1)

$(KERNELS): %: $(BUILD)/% ## one kernel's binary ($(KERNELS)); ./KERNEL is a link to the device last made
	@$(call link,$@,$<)

lib: $(BUILD)/libbookends.a $(BUILD)/libbookends.so ## libbookends.a and libbookends.so, with dev/lib/bookends.h
	@$(call link,libbookends.a,$(BUILD)/libbookends.a)
	@$(call link,libbookends.so,$(BUILD)/libbookends.so)
	@$(call link,libbookends.so.$(MAJOR),$(BUILD)/libbookends.so)

# DESTDIR is put in front of every path that is written, for packages.
install: $(BUILD)/libbookends.a $(BUILD)/libbookends.so ## the library, its header and a pkg-config file, to PREFIX=/usr/local (DESTDIR=)
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

run: all ## the main job: every version of every kernel on real text, checked and timed; a table for each kernel
	@rm -f $(BUILD)/run.jsonl
	$(if $(filter cpu,$(DEVICE)),@echo "The CPU device runs the kernels: the times say nothing about a GPU."; echo)
	@status=0; for kernel in $(KERNELS); do \
	    ./$$kernel all --brief --tokens dev/data/primer.bin --json $(BUILD)/run.jsonl || status=$$?; echo; \
	done; echo "All measurements: $(BUILD)/run.jsonl"; exit $$status

# The libraries and the programs, without the links at the top; and those with the programs of the tests.
libraries: $(BUILD)/libbookends.a $(BUILD)/libbookends.so
programs: $(KERNELS:%=$(BUILD)/%)
binaries: libraries programs $(BUILD)/build.json $(PROGRAMS:%=$(BUILD)/test/%)

test: binaries $(filter build/%,$(TEST_PYTHON)) ## the tests; TESTS="-k 'shapes or types'" passes options to pytest
	BOOKENDS_BUILD=$(BUILD) BOOKENDS_DEVICE=$(DEVICE) SANITIZE=$(SANITIZE) CXX="$(CXX)" \
	    $(TEST_PYTHON) -m pytest -q -n $(WORKERS) dev/test $(TESTS)

test-python: $(BUILD)/libbookends.so $(BUILD)/build.json build/venv-torch/bin/python ## the Python package's tests with torch, which it installs into build/venv-torch (4.6 GB)
	BOOKENDS_BUILD=$(BUILD) BOOKENDS_DEVICE=$(DEVICE) SANITIZE=$(SANITIZE) CXX="$(CXX)" \
	    build/venv-torch/bin/python -m pytest -q -rs -n 2 dev/test/test_python.py $(TESTS)

# More warnings than a build shows, as errors, from g++ and, where it is found, clang++. Nothing is compiled.
STRICT := -Wformat=2 -Wformat-security -Wshadow -Werror -fsyntax-only
CHECKED := $(wildcard *.cu dev/lib/*.cu dev/test/*.cu)
COMPILERS := '$(CXX)' $(if $(findstring clang,$(CXX)),,$(shell command -v clang++))
warnings: $(HEADERS:%=$(SOURCE)%) $(CHECKED:%=$(SOURCE)%) ## every source of the CPU device, with more warnings, as errors
	$(if $(filter cuda,$(DEVICE)),@echo "make $@: needs DEVICE=cpu" >&2; exit 1)
	@for compiler in $(COMPILERS); do \
	    for file in $(CHECKED:%=$(SOURCE)%) $(wildcard dev/cpu/*.cc); do \
	        $$compiler $(subst $(CXX) -std,-std,$(COMPILE)) $(STRICT) -x c++ $$file || exit 1; \
	    done; \
	done

results: ## measures the README's shapes on the GPU at hand, into dev/results; writes the README's tables and pictures
	scripts/measure.sh
	scripts/tables.py
	$(MAKE) plots

plots: $(filter build/%,$(TEST_PYTHON)) ## the README's pictures, from dev/results (needs matplotlib)
	$(TEST_PYTHON) scripts/plot.py dev/results/nvidia-h200/*.jsonl -o dev/results/nvidia-h200 --only ladder,memory --format svg

# What profile and sass look at; a build of the CPU device has neither.
K ?= $(firstword $(KERNELS))
on_gpu = $(if $(filter cuda,$(DEVICE)),$(1),@echo "make $@: needs DEVICE=cuda" >&2; exit 1)

profile: $(if $(filter cuda,$(DEVICE)),$(BUILD)/$(K)) ## K=encoder_forward V=3: what Nsight Compute says of its kernels (needs ncu)
	$(call on_gpu,ncu --set full --kernel-id ::regex:^$(K)_:1 --clock-control none $< $(V) --bench --repeat 1 $(if $(filter lm_head,$(K)),,--block-size 256))

sass: $(if $(filter cuda,$(DEVICE)),$(BUILD)/$(K)) ## K=encoder_forward: the machine code of its kernels (needs cuobjdump)
	$(call on_gpu,cuobjdump --dump-sass $<)

clean: ## removes everything that was built
	rm -rf build .pytest_cache $(KERNELS) libbookends.a libbookends.so libbookends.so.*

# ---- rules ----

# Written anew only when the text changes, so that what depends on it is rebuilt only then.
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

# By way of another name, since a file may be asked for as dir/../file too, at the same time.
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
