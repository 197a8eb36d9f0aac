# The API. From the repository's root: docker build -f docker/api.Dockerfile -t tunery-api:0.1.0 .

FROM python:3.11-slim-bookworm AS builder
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements/build.txt requirements/api.txt requirements/
RUN python -m venv /build && /build/bin/pip install -r requirements/build.txt
# What runs has no pip of its own.
RUN python -m venv --without-pip /opt/tunery && /build/bin/pip --python /opt/tunery install -r requirements/api.txt
COPY LICENSE README.md pyproject.toml ./
COPY tuning_db tuning_db
COPY service service
# Uploads are read by workers.frontend.inspect, in a process of their own; nothing else of it runs here.
COPY workers workers
RUN /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /build/bin/pip --python /opt/tunery install --no-deps /wheels/tunery-*.whl

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --create-home --home-dir /var/lib/tunery tunery
COPY --from=builder /opt/tunery /opt/tunery
ENV PATH=/opt/tunery/bin:$PATH PYTHONUNBUFFERED=1 TUNERY_DATA_DIR=/var/lib/tunery
USER 10001:10001
WORKDIR /var/lib/tunery
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=10s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=8)"]
CMD ["python", "-m", "service.app", "--host", "0.0.0.0", "--port", "8000"]
