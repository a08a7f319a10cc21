# The image holds Python, the pinned dependencies and the package; nothing is built at its start.
FROM python:3.13-slim-bookworm AS dependencies
COPY requirements/runtime.txt /requirements.txt
RUN python -m venv /venv && \
    /venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check \
        --require-hashes --only-binary :all: -r /requirements.txt && \
    /venv/bin/python -m pip uninstall --yes pip

FROM python:3.13-slim-bookworm
LABEL org.opencontainers.image.title="kubevirt-eviction-exporter" \
      org.opencontainers.image.description="Tells which KubeVirt VMs must not be moved now" \
      org.opencontainers.image.licenses="Apache-2.0"
# The file system is read-only at run time, so no byte code is written then.
ENV PATH=/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
COPY --from=dependencies /venv /venv
COPY exporter /app/exporter
WORKDIR /app
RUN python -m compileall -q /app/exporter
USER 65532:65532
EXPOSE 9810 9811
ENTRYPOINT ["python", "-m", "exporter"]
