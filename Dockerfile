# The image has Python, the pinned dependencies and the package. It has no shell, no package manager
# and no pip. All bytecode is compiled here.
FROM python:3.13-slim-trixie AS build
COPY requirements/runtime.txt /requirements.txt
# The 850 modules of Kubernetes' types and groups are never imported (exporter/kube/lean_import.py),
# so they are deleted.
RUN python -m pip install --no-cache-dir --disable-pip-version-check --no-compile \
        --require-hashes --only-binary :all: --target /packages -r /requirements.txt && \
    rm -r /packages/bin && \
    find /packages/kubernetes_asyncio/client/api /packages/kubernetes_asyncio/client/models \
        -type f -delete && \
    python -m compileall -q --invalidation-mode unchecked-hash /packages
COPY exporter /exporter
# The simulated cluster and the what-if, a quarter of the package, are for a person's own machine.
RUN rm -r /exporter/demo /exporter/whatif && python -m compileall -q --invalidation-mode unchecked-hash /exporter

# Debian 13 with Python 3.13 and nothing else; it sets the user 65532.
FROM gcr.io/distroless/python3-debian13:nonroot
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kubevirt-eviction-exporter" \
      org.opencontainers.image.description="Tells which KubeVirt VMs must not be moved now" \
      org.opencontainers.image.source="https://github.com/kubevirt-eviction-exporter/exporter" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# The file system is read-only at run time, so Python cannot write bytecode.
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
COPY --from=build /packages /app
COPY --from=build /exporter /app/exporter
WORKDIR /app
USER 65532:65532
EXPOSE 9810 9811
ENTRYPOINT ["python", "-m", "exporter"]
