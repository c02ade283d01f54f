# docker build -t finetune . && docker run --rm -v finetune:/data finetune train quickstart
#
# On NVIDIA GPUs, build with TORCH_INDEX=https://download.pytorch.org/whl/cu128 and run with --gpus all --shm-size 8g.
FROM python:3.11-slim-bookworm AS build

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PATH=/opt/venv/bin:$PATH
RUN python -m venv /opt/venv

# torch first and by itself: it is the largest layer, and changes least.
WORKDIR /opt/finetune
COPY constraints.txt ./
RUN pip install --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple -c constraints.txt torch

COPY pyproject.toml README.md LICENSE ./
COPY finetune finetune
COPY configs configs
COPY recipes recipes
COPY docs docs
RUN pip install -c constraints.txt ".[report]"

# The image that runs has the installed packages, and none of the files that they were built from.
FROM python:3.11-slim-bookworm

COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1

# A run needs no more rights than its own folder.
RUN useradd --uid 1000 --create-home trainer && install -d -o trainer /data
USER 1000
WORKDIR /data

ENTRYPOINT ["finetune"]
CMD ["--help"]
