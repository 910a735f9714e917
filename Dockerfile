# syntax=docker/dockerfile:1.7
# The server's image. VARIANT and BASE go together:
#   docker build -t slipstream:0.1.0-cuda .
#   docker build -t slipstream:0.1.0-cpu --build-arg VARIANT=cpu --build-arg BASE=debian:bookworm-slim .
# deploy/README.md says how to use an index of your own.

ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04

# Only what is installed from an index: while this list stays the same, so does the layer with the dependencies.
FROM ${BASE} AS requirements
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml /
RUN python3 -c 'import tomllib; project = tomllib.load(open("/pyproject.toml", "rb"))["project"]; \
    extras = project["optional-dependencies"]; \
    print(*project["dependencies"], *extras["gateway"], *extras["tracing"], sep="\n")' \
    > /requirements.txt

FROM ${BASE} AS dependencies
ARG VARIANT=cuda
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/slipstream
COPY --from=requirements /requirements.txt /
# PyTorch's own index has wheels without CUDA; a pip.conf given as secret may name any other. Bytecode is compiled
# here: the root file system of a container is read-only.
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    if [ "$VARIANT" = cpu ]; then \
        /opt/slipstream/bin/pip install --index-url "$CPU_INDEX" "$(grep '^torch' /requirements.txt)"; \
    fi \
    && /opt/slipstream/bin/pip install -r /requirements.txt

FROM dependencies AS package
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY engine engine
COPY server server
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/slipstream/bin/pip install --no-deps --prefix /package .

FROM ${BASE}
ARG VARIANT=cuda
# Triton compiles a small launcher with the C compiler the first time that a kernel runs.
# hadolint ignore=DL3008,SC2086
RUN compiler=; if [ "$VARIANT" = cuda ]; then compiler="gcc libc6-dev python3-dev"; fi \
    && apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 tini $compiler \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --home-dir /var/cache/slipstream --create-home --shell /usr/sbin/nologin slipstream
# Two layers: a change of our code leaves the large one as it is.
COPY --from=dependencies /opt/slipstream /opt/slipstream
COPY --from=package /package /opt/slipstream
# Run as modules by the health check and by whoever fetches a known model.
COPY tools/__init__.py tools/fetch_model.py tools/health_probe.py tools/known_models.py /app/tools/
WORKDIR /app
ENV PATH=/opt/slipstream/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    SLIPSTREAM_HOST=0.0.0.0 \
    SLIPSTREAM_CACHE=/var/cache/slipstream \
    HF_HOME=/var/cache/slipstream/huggingface \
    TRITON_CACHE_DIR=/var/cache/slipstream/triton
# All that is written: downloads and compiled kernels here, sockets in /tmp (a tmpfs where the root is read-only).
VOLUME ["/var/cache/slipstream"]
USER 10001:10001
EXPOSE 50051 9090
# Drains: give the container longer than --drain-delay and --grace (30 s) before it is killed.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python3", "-m", "tools.health_probe", "127.0.0.1:50051"]
ENTRYPOINT ["tini", "--", "slipstream"]
CMD ["serve"]
# Last, because they differ from commit to commit.
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="slipstream" \
      org.opencontainers.image.description="gRPC inference server with speculative decoding (${VARIANT})" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
