# A worker for CPUs. From the repository's root: docker build -f docker/worker-cpu.Dockerfile -t tunery-worker-cpu:0.1.0 .

FROM python:3.11-slim-bookworm AS builder
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements/build.txt requirements/worker.txt requirements/
RUN python -m venv /build && /build/bin/pip install -r requirements/build.txt
# What runs has no pip of its own.
RUN python -m venv --without-pip /opt/tunery && /build/bin/pip --python /opt/tunery install -r requirements/worker.txt
COPY LICENSE README.md pyproject.toml ./
COPY tuning_db tuning_db
COPY service service
COPY workers workers
RUN /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /build/bin/pip --python /opt/tunery install --no-deps /wheels/tunery-*.whl

FROM python:3.11-slim-bookworm
# Libraries are linked where they are tuned. Candidates take `ld` alone (binutils, which gcc brings); TVM's
# export_library links the final one through a compiler's driver, g++ or else gcc, with the C library's start-up files.
# tini, because the trees of processes that the worker kills leave orphans, which someone has to collect.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev tini \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home --home-dir /var/lib/tunery tunery
COPY --from=builder /opt/tunery /opt/tunery
ENV PATH=/opt/tunery/bin:$PATH PYTHONUNBUFFERED=1 TUNERY_DATA_DIR=/var/lib/tunery
USER 10001:10001
WORKDIR /var/lib/tunery
STOPSIGNAL SIGTERM
# A worker that cannot work exits. Celery's ping goes unanswered as long as a job runs, and a probe that starts an
# interpreter every few seconds would be measured along with the candidates. GET /v1/devices says when a worker last
# reported itself, and how many jobs wait for it.
HEALTHCHECK NONE
ENTRYPOINT ["tini", "--"]
CMD ["python", "-m", "workers"]
