# docker build --tag powerclip .
# docker run --rm --gpus all --shm-size 16g --volume "$PWD:/workspace" powerclip train --recipe quickstart/powerclip
#
# torch's wheels bring CUDA's libraries, so the base has only what a GPU's driver needs. /workspace is where runs are
# written: a folder that is mounted there must be writable for user 1000, or add --user "$(id -u)".

FROM python:3.12-slim-bookworm AS wheel
WORKDIR /source
RUN pip install --no-cache-dir hatchling==1.27.0
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY powerclip powerclip
COPY recipes recipes
COPY studies studies
RUN python -m hatchling build -t wheel -d /wheels

FROM nvidia/cuda:13.0.1-base-ubuntu24.04
ARG EXTRAS=all
# A C compiler and Python's headers: triton and torch.compile build small modules when they first run.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/powerclip
ENV PATH=/opt/powerclip/bin:$PATH
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/powerclip-*.whl)[$EXTRAS]" && rm -rf /wheels
# Ubuntu's image has a user 1000 already, called ubuntu.
RUN mkdir /workspace && chown 1000:1000 /workspace
ENV HOME=/workspace/.home
USER 1000:1000
WORKDIR /workspace
ENTRYPOINT ["powerclip"]
CMD ["--help"]
