# The README uses `make run` and `make test`, which need Python alone. The others are for development.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
TESTED := $(VENV)/.tested
DEVELOPMENT := $(VENV)/.development
# Tests start hundreds of programs, so their bytecode is written even if the environment turns it off.
test test-integration test-e2e test-vms soak: export PYTHONDONTWRITEBYTECODE =
# The debug hooks of malloc only check code in C, and take a seventh of the time.
PYTEST := PYTHONMALLOC=pymalloc $(BIN)/python -X dev -W default -m pytest
DEMO ?=
BENCH ?=
SCENARIOS ?=
SEEDS ?=
MONTHS ?=
MUTANTS ?=
ONLY ?=
TESTS ?=
FULL ?=
KUBEVIRT ?=
DIST ?= dist
# `needs-go` puts a Go there if the machine has none, or an old one.
export PATH := $(CURDIR)/.tools/go/bin:$(PATH)
# The modules with our own Go code: those that `make check` compiles within minutes, and those that
# it only checks with FULL=1. The flags in GO_ENV are those with which tests/tools/build builds the
# descheduler, so that checks and builds share compiled packages.
GO_QUICK := deploy/descheduler $(addprefix tests/tools/,bench-load pause)
GO_SLOW := $(addprefix tests/tools/,added-crds bench-informer cainjector kubevirt kubevirt-nodes shared)
# The programs of a node, and those that the e2e tests start next to it.
CLUSTER_TOOLS := kube-apiserver kubelet kube-controller-manager kube-scheduler kube-proxy etcd kubectl \
    kustomize helm virt-api virt-controller crds added-crds manifests pause
FULL_TOOLS := prometheus promtool alertmanager prometheus-operator prometheus-config-reloader cainjector
# The programs of KubeVirt that run real VMs on two nodes.
VMS_TOOLS := virt-launcher virt-handler virt-operator virt-exportproxy virt-launcher-monitor virt-chroot \
    virt-tail virt-freezer virt-probe libvirt-hook-client container-disk operator
GO_ENV := CGO_ENABLED=0 GOWORK=off GOFLAGS='-mod=readonly -trimpath -buildvcs=false'

.PHONY: run alerts alert-months test test-integration test-e2e test-vms lint check soak mutants bench matrix canary tools dashboards screenshots rules reference manifests pins sbom release-dry-run clean needs-python needs-go needs-test needs-test-integration needs-test-e2e needs-test-vms

# `make run` runs the exporter with a simulated cluster, `make run KUBECONFIG=...` with a real one.
# A KUBECONFIG in the environment is ignored.
run: $(RUNTIME)
ifeq ($(origin KUBECONFIG),command line)
	@exec $(BIN)/python -m exporter --kubeconfig $(KUBECONFIG)
else
	@exec $(BIN)/python -m exporter demo $(DEMO)
endif

# Runs Prometheus with our alerts on the demo of `make run` in another terminal. If Prometheus is
# not on the PATH, it is built first.
alerts: $(RUNTIME)
	@tests/tools/build prometheus
	@exec $(BIN)/python -m alerts.demo

# Runs the tests of tests/unit, tests/docs and tests/program, which need Python alone, and prints how
# much of the code they run. TESTS=tests/unit/engine runs one folder.
test: needs-python needs-test $(TESTED)
	@rm -f .coverage*
	SOAK= $(BIN)/python -m coverage run -m pytest -m "not soak" -n auto --dist worksteal $(or $(TESTS),tests)
	@$(BIN)/python -m coverage combine -q
	@$(BIN)/python -m coverage report $(if $(TESTS),,--fail-under=90) | tail -n 1

# Runs the tests with real servers, which it builds first. The folders with the longest files begin,
# so that no worker has a long file at the end. With GOGC=400 a kube-apiserver starts with a fifth
# less CPU time, and takes twice the memory.
test-integration: needs-python needs-test-integration needs-go $(DEVELOPMENT) tools
	SOAK= GOGC=400 $(PYTEST) -m "not soak" -n 6 --dist loadfile --no-loadscope-reorder \
	    $(or $(TESTS),$(addprefix tests/integration/,descheduling kubevirt alerts bench deploy apiserver chaos canary))

# Builds the images from our Dockerfiles, and tests them in a real cluster of one node. It needs
# root and a container runtime, and names missing packages. FULL=1 adds tests that take longer.
test-e2e: needs-python needs-test-e2e needs-go $(DEVELOPMENT)
	@tests/tools/build $(CLUSTER_TOOLS) $(if $(FULL),$(FULL_TOOLS))
	@FULL=$(FULL) $(BIN)/python -m tests.e2e.images
	FULL=$(FULL) $(PYTEST) tests/e2e

# Tests with all of KubeVirt on two nodes: libvirt and QEMU run and migrate VMs, without KVM. It
# needs what `make test-e2e` needs, a C compiler and 5 GB of memory. `.ci/run` does not run it.
# KUBEVIRT=1.8.4 tests another version. With SOAK=1 a descheduler moves VMs for ten minutes before
# the drain, instead of once.
test-vms: needs-python needs-test-vms needs-go $(DEVELOPMENT)
	@tests/tools/build $(CLUSTER_TOOLS) $(if $(KUBEVIRT),,$(VMS_TOOLS))
	@for part in $(if $(KUBEVIRT),kubevirt kubevirt-nodes); do tests/tools/build $$part@$(KUBEVIRT) || exit 1; done
	@$(BIN)/python -m tests.vms.images
	$(PYTEST) tests/vms

# Runs the tests marked `soak` at their full sizes, which takes more than three hours.
soak: needs-python needs-go $(DEVELOPMENT) tools
	SOAK=1 $(PYTEST) -m soak --timeout 7200 $(or $(TESTS),tests tests/integration)

# Checks that a test fails after each small change of the engine's code. It makes 45 changes in each
# module, or all changes with ALL=1. `MUTANTS="exporter/engine/store/store.py --seed 2"` chooses a
# module and other changes. It takes a quarter of an hour. CI does not run it.
mutants: needs-python $(DEVELOPMENT)
	$(BIN)/python -m tests.mutants $(if $(ALL),--all) $(MUTANTS)

# Checks format, lint, types and import layers of the Python code within seconds, without Go.
lint: needs-python $(DEVELOPMENT)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint needs-go
	$(BIN)/yamllint --strict .
	$(BIN)/hadolint Dockerfile deploy/descheduler/Dockerfile
	@tests/tools/build actionlint helm
	@echo actionlint, helm lint
	@PATH="$(CURDIR)/.tools/bin:$$PATH" actionlint -shellcheck=
	@PATH="$(CURDIR)/.tools/bin:$$PATH" helm lint --strict --quiet deploy/helm/kubevirt-eviction-exporter
	@unformatted=$$(gofmt -l $(GO_QUICK) $(GO_SLOW)) || exit 1; test -z "$$unformatted" || { echo "gofmt: $$unformatted" >&2; exit 1; }
	@tests/tools/build staticcheck
	@for folder in $(GO_QUICK) $(if $(FULL),$(GO_SLOW)); do \
	    echo "go vet, staticcheck: $$folder"; \
	    (cd $$folder && $(GO_ENV) go vet ./... && $(GO_ENV) PATH="$(CURDIR)/.tools/bin:$$PATH" staticcheck ./...) || exit 1; \
	done

# Measures what the exporter costs, and prints tables. It takes 25 minutes, and the machine should
# do nothing else. `make bench BENCH=--write` writes docs/performance.md and tests/bench/results.md.
bench: needs-go $(DEVELOPMENT)
	$(BIN)/python -m tests.bench $(BENCH)

# Runs the alerts over simulated days with faults and without, and prints what fires how soon.
# SCENARIOS="F2 F14" and SEEDS="1 2 3" choose; all scenarios with one seed take half an hour.
# MONTHS=--write writes the tables of docs/alerts.md.
alert-months: needs-go $(DEVELOPMENT)
	@tests/tools/build alert-months
	$(BIN)/python -m tests.months $(SCENARIOS) --seeds $(or $(SEEDS),1) $(MONTHS)

# Builds other versions of KubeVirt, Kubernetes and the descheduler, runs the tests with them, and
# writes docs/versions.md and tests/matrix/results.md. With two cores it takes an hour and a half,
# half of it for builds. `make matrix ONLY=1.7.0` runs the rows of one version. CI does not run it.
matrix: needs-go $(DEVELOPMENT) tools
	$(BIN)/python -m tests.matrix $(ONLY)

# Fails if the newest KubeVirt, Kubernetes or descheduler lacks something that the exporter reads.
canary: needs-go $(DEVELOPMENT)
	$(BIN)/python -m tests.canary

# Builds the real servers for the tests once, into .tools/.
tools: needs-go
	@tests/tools/build

# Generates the dashboards' JSON from their code. A test checks that it is up to date.
dashboards: $(DEVELOPMENT)
	$(BIN)/python -m dashboards.build

# Makes the documents' pictures of the demo's status page and of the dashboards, in the installed
# Chromium. The dashboards are drawn by Grafana's libraries, which npm gets.
screenshots: needs-go $(DEVELOPMENT)
	@tests/tools/build alert-months prometheus
	$(BIN)/python -m tests.generate.screenshots
	$(BIN)/python -m tests.generate.dashboards

# Generates prometheusrule.yaml and the runbook URLs from alerts/rules.yaml. A test checks that they
# are up to date.
rules: $(DEVELOPMENT)
	$(BIN)/python -m tests.generate.rules

# Generates docs/api.md from the OpenAPI document and the API's answers, and the tables of
# docs/reference.md that repeat the program. Tests check that both are up to date.
reference: $(DEVELOPMENT)
	$(BIN)/python -m tests.generate.reference

# Generates the derived parts of deploy/, such as image tags and copies of the policy. A test checks
# that they are up to date.
manifests: $(DEVELOPMENT)
	@tests/tools/build kustomize
	$(BIN)/python -m tests.generate.manifests

# Writes a bill of materials (CycloneDX) from the pins, with hashes, and without network access.
sbom: $(DEVELOPMENT)
	@mkdir -p $(DIST)
	@sed "s/^dynamic = .*/version = \"$$($(BIN)/python -c 'import exporter; print(exporter.__version__)')\"/" \
	    pyproject.toml > $(DIST)/pyproject.toml
	$(BIN)/python -W ignore -m cyclonedx_py requirements --output-reproducible --pyproject $(DIST)/pyproject.toml \
	    --output-file $(DIST)/sbom.cdx.json requirements/runtime.txt
	@rm $(DIST)/pyproject.toml

# Writes the files of a release into dist/: wheel, source, chart, install.yaml, rules, bill of
# materials and checksums. Two runs of one commit write the same bytes. Images and signatures need a
# registry, so the release workflow makes them.
release-dry-run: sbom
	@tests/tools/build helm kustomize
	@$(BIN)/python -m tests.generate.release $(DIST)

# Fails if files that a row of docs/versions.md tests have changed since its run, or if a base image
# of the Dockerfiles is not pinned by its digest. A release needs both.
release-check: $(DEVELOPMENT)
	@$(BIN)/python -m tests.generate.release --check

# Updates the pins of the four requirements files. It uses only wheels, so that no code of the
# packages runs. Read the diff before you commit it.
pins: $(DEVELOPMENT)
	$(BIN)/uv pip compile -q --upgrade --only-binary :all: --universal --python-version 3.11 --generate-hashes --no-header \
	    pyproject.toml -o requirements/runtime.txt
	$(BIN)/uv pip compile -q --upgrade --only-binary :all: --universal --python-version 3.11 --generate-hashes --no-header \
	    --group dev -c requirements/runtime.txt pyproject.toml -o requirements/development.txt
	$(BIN)/uv pip compile -q --only-binary :all: --universal --python-version 3.11 --generate-hashes --no-header \
	    --group test -c requirements/development.txt pyproject.toml -o requirements/test.txt
	$(BIN)/uv pip compile -q --upgrade --only-binary :all: --universal --python-version 3.11 --generate-hashes --no-header \
	    --group go -o requirements/go.txt

clean:
	rm -rf $(VENV) .tools .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

needs-python:
	@command -v $(PYTHON) >/dev/null || { echo "this needs Python 3.11 or newer: $(PYTHON) is not on the PATH" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "this needs Python 3.11 or newer: $(PYTHON) is " + sys.version.split()[0])'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "this needs Python's venv module (Debian: python3-venv)" >&2; exit 1; }

# Names what the machine lacks, and which tests are skipped therefore.
needs-test needs-test-integration needs-test-e2e needs-test-vms:
	@$(PYTHON) -m tests.needs $(@:needs-%=%)

needs-go: needs-python
	@PYTHON=$(PYTHON) tests/tools/go

$(RUNTIME): requirements/runtime.txt | needs-python
	@mkdir -p $(VENV) 2>/dev/null && test -w $(VENV) || { echo "$(CURDIR) is read-only: copy it, or put the packages elsewhere, as in 'make run VENV=/tmp/venv'" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

$(TESTED): requirements/test.txt $(RUNTIME)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

$(DEVELOPMENT): requirements/development.txt $(RUNTIME)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@
