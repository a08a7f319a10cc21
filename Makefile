# The two commands of the README are `make run` and `make test`; the rest serves them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
QUICK := $(VENV)/.quick
DEVELOPMENT := $(VENV)/.development
# The debug hooks of malloc are for code in C, and cost a seventh of the time. Tests start hundreds of
# programs, so their bytecode is kept even where the environment says not to.
PYTEST := PYTHONMALLOC=pymalloc PYTHONDONTWRITEBYTECODE= $(BIN)/python -X dev -W default -m pytest
DEMO ?=
BENCH ?=
MUTANTS ?=
ONLY ?=
TESTS ?=
FULL ?=
KUBEVIRT ?=
DIST ?= dist
# Every folder with Go of our own. The flags are those of tests/tools/build, so that checks and
# builds share what is compiled.
GO_FOLDERS := deploy/descheduler $(patsubst %/,%,$(sort $(dir $(wildcard tests/tools/*/*.go))))
# What a node runs, and what the e2e tests start beside it.
CLUSTER_TOOLS := kube-apiserver kubelet kube-controller-manager kube-scheduler kube-proxy etcd kubectl \
    kustomize helm virt-api virt-controller crds added-crds manifests certificates pause
FULL_TOOLS := prometheus promtool alertmanager prometheus-operator prometheus-config-reloader cainjector
# KubeVirt's programs, for real VMs on two such nodes.
VMS_TOOLS := virt-launcher virt-handler virt-operator virt-exportproxy virt-launcher-monitor virt-chroot \
    virt-tail virt-freezer virt-probe libvirt-hook-client container-disk operator
GO_ENV := CGO_ENABLED=0 GOWORK=off GOFLAGS='-mod=readonly -trimpath -buildvcs=false'

.PHONY: run alerts test quick lint check e2e vms soak mutants bench matrix canary tools dashboards screenshots rules reference manifests pins sbom release-dry-run clean needs-python needs-cluster needs-vms needs-go

# `make run` plays the simulated cluster; `make run KUBECONFIG=...` watches a real one.
# Only `make run KUBECONFIG=...` counts; a KUBECONFIG in the environment is ignored.
run: $(RUNTIME)
ifeq ($(origin KUBECONFIG),command line)
	@exec $(BIN)/python -m exporter --kubeconfig $(KUBECONFIG)
else
	@exec $(BIN)/python -m exporter demo $(DEMO)
endif

# Prometheus with our alerts on the demo of `make run`, which another terminal plays. It is built
# first where there is none on the PATH.
alerts: $(RUNTIME)
	@tests/tools/build prometheus
	@exec $(BIN)/python -m alerts.demo

# TESTS=tests/unit/engine runs one folder. Nothing is built for tests that are all quick: then pytest
# finds no other and ends with 5.
test: needs-python $(DEVELOPMENT)
	@$(if $(TESTS),$(PYTEST) -qq --collect-only -m "not quick and not soak" $(TESTS) >/dev/null; test $$? = 5 ||) \
	    $(MAKE) --no-print-directory tools
	SOAK= $(PYTEST) -m "not soak" -n 4 --dist loadfile --no-loadscope-reorder $(or $(TESTS),tests)

# The tests that need no real server, no browser and no Go, without the simulated weeks: for the inner loop.
quick: needs-python $(QUICK)
	SOAK= $(PYTEST) -m "quick and not soak" -n 2 --dist loadfile --ignore tests/unit/demo/test_week.py \
	    --ignore tests/unit/whatif/test_replay.py $(or $(TESTS),tests/unit tests/docs tests/support)

# The images, built from our Dockerfiles, in a real cluster of one node. It needs root and a container
# runtime, and says which packages are missing. With FULL=1 also what takes longer.
e2e: needs-python needs-cluster needs-go $(DEVELOPMENT)
	@tests/tools/build $(CLUSTER_TOOLS) $(if $(FULL),$(FULL_TOOLS))
	@FULL=$(FULL) $(BIN)/python -m tests.e2e.images
	FULL=$(FULL) $(PYTEST) tests/e2e

# The whole of KubeVirt on two nodes: libvirt and QEMU run VMs and migrate them, without KVM. It needs
# what `make e2e` needs, a C compiler and 5 GB of memory; not in CI. KUBEVIRT=1.8.4 for another version.
vms: needs-python needs-vms needs-go $(DEVELOPMENT)
	@tests/tools/build $(CLUSTER_TOOLS) $(if $(KUBEVIRT),,$(VMS_TOOLS))
	@for part in $(if $(KUBEVIRT),kubevirt kubevirt-nodes); do tests/tools/build $$part@$(KUBEVIRT) || exit 1; done
	@$(BIN)/python -m tests.vms.images
	$(PYTEST) tests/vms

# The same tests at the sizes that prove a number; an hour and more.
soak: needs-python needs-go $(DEVELOPMENT) tools
	SOAK=1 $(PYTEST) -m soak --timeout 7200 $(or $(TESTS),tests)

# Whether a test notices each small change of the engine's code: 45 changes of each module, all of
# them with ALL=1, or `MUTANTS="exporter/engine/store.py --seed 2"`. A quarter of an hour; not in CI.
mutants: needs-python $(DEVELOPMENT)
	$(BIN)/python -m tests.mutants $(if $(ALL),--all) $(MUTANTS)

# Format, lint, types and import layers of Python: seconds, and no Go.
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
	@unformatted=$$(gofmt -l $(GO_FOLDERS)) || exit 1; test -z "$$unformatted" || { echo "gofmt: $$unformatted" >&2; exit 1; }
	@tests/tools/build staticcheck
	@for folder in $(GO_FOLDERS); do \
	    echo "go vet, staticcheck: $$folder"; \
	    (cd $$folder && $(GO_ENV) go vet ./... && $(GO_ENV) PATH="$(CURDIR)/.tools/bin:$$PATH" staticcheck ./...) || exit 1; \
	done

# What the exporter costs beside what it is measured against, as a table; 25 minutes, and the
# machine should do nothing else. `make bench BENCH=--write` puts the tables into docs/performance.md.
bench: needs-go $(DEVELOPMENT)
	$(BIN)/python -m tests.bench $(BENCH)

# The tests of KubeVirt, Kubernetes and the descheduler with other versions of each, which are built
# first; writes docs/versions.md. Some hours, or less with `make matrix ONLY=1.7.0`; not in CI.
matrix: needs-go $(DEVELOPMENT) tools
	$(BIN)/python -m tests.matrix $(ONLY)

# What the newest KubeVirt, Kubernetes and descheduler no longer have of what we read.
canary: needs-go $(DEVELOPMENT)
	$(BIN)/python -m tests.canary

# Real servers for the tests, built once into .tools/.
tools: needs-go
	@tests/tools/build

# The dashboards' JSON from the code beside it; a test holds it up to date.
dashboards: $(DEVELOPMENT)
	$(BIN)/python -m dashboards.build

# The documents' pictures: of the status page, from the demo, with the Chromium that is installed,
# and of the dashboards' queries.
screenshots: $(DEVELOPMENT)
	$(BIN)/python -m tests.generate.screenshots
	$(BIN)/python -m tests.generate.dashboards

# prometheusrule.yaml and the runbook URLs, from alerts/rules.yaml; a test holds them up to date.
rules: $(DEVELOPMENT)
	$(BIN)/python -m tests.generate.rules

# docs/api.md, from the OpenAPI document and the API's own answers, and the tables of
# docs/reference.md that repeat the program; tests hold both up to date.
reference: $(DEVELOPMENT)
	$(BIN)/python -m tests.generate.reference

# The parts of deploy/ that are derived: images, copies of the policy; a test holds them up to date.
manifests: $(DEVELOPMENT)
	@tests/tools/build kustomize
	$(BIN)/python -m tests.generate.manifests

# What the image has of others, with its hashes, as CycloneDX: from the pins, without a network.
sbom: $(DEVELOPMENT)
	@mkdir -p $(DIST)
	@sed "s/^dynamic = .*/version = \"$$($(BIN)/python -c 'import exporter; print(exporter.__version__)')\"/" \
	    pyproject.toml > $(DIST)/pyproject.toml
	$(BIN)/python -W ignore -m cyclonedx_py requirements --output-reproducible --pyproject $(DIST)/pyproject.toml \
	    --output-file $(DIST)/sbom.cdx.json requirements/runtime.txt
	@rm $(DIST)/pyproject.toml

# The files of a release, into dist/: wheel, source, chart, install.yaml, rules, bill of materials and
# checksums. Two runs from one commit are equal. Images and signatures need a registry: the workflow.
release-dry-run: sbom
	@tests/tools/build helm kustomize
	@$(BIN)/python -m tests.generate.release $(DIST)

# Fails unless every base image of the Dockerfiles is pinned by its digest; a release needs that.
release-check: $(DEVELOPMENT)
	@$(BIN)/python -m tests.generate.release --check

# New pins for the three sets of requirements, of wheels only, so that no code of theirs runs; read the diff before committing it.
pins: $(DEVELOPMENT)
	$(BIN)/uv pip compile -q --upgrade --only-binary :all: --universal --python-version 3.11 --generate-hashes --no-header \
	    pyproject.toml -o requirements/runtime.txt
	$(BIN)/uv pip compile -q --upgrade --only-binary :all: --universal --python-version 3.11 --generate-hashes --no-header \
	    --group dev -c requirements/runtime.txt pyproject.toml -o requirements/development.txt
	$(BIN)/uv pip compile -q --only-binary :all: --universal --python-version 3.11 --generate-hashes --no-header \
	    --group quick -c requirements/development.txt pyproject.toml -o requirements/quick.txt

clean:
	rm -rf $(VENV) .tools .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

needs-python:
	@command -v $(PYTHON) >/dev/null || { echo "this needs Python 3.11 or newer: $(PYTHON) is not on the PATH" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "this needs Python 3.11 or newer: $(PYTHON) is " + sys.version.split()[0])'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "this needs Python's venv module (Debian: python3-venv)" >&2; exit 1; }

needs-cluster:
	@$(PYTHON) -m tests.e2e.needs

needs-vms:
	@$(PYTHON) -m tests.e2e.needs vms

needs-go:
	@command -v go >/dev/null || { echo "the tests build real servers with Go 1.26 or newer: go is not on the PATH" >&2; exit 1; }
	@go env GOVERSION | awk '{ split(substr($$1, 3), v, "."); if (v[1] < 1 || (v[1] == 1 && v[2] < 26)) { print "the tests build real servers with Go 1.26 or newer: this is " $$1 > "/dev/stderr"; exit 1 } }'

$(RUNTIME): requirements/runtime.txt | needs-python
	@mkdir -p $(VENV) 2>/dev/null && test -w $(VENV) || { echo "$(CURDIR) is read-only: copy it, or have the packages elsewhere, as in 'make run VENV=/tmp/venv'" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

$(QUICK): requirements/quick.txt $(RUNTIME)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

$(DEVELOPMENT): requirements/development.txt $(RUNTIME)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@
