# docker build -t finetune . && docker run --rm -v finetune:/data finetune train quickstart
#
# On NVIDIA GPUs, build with TORCH_INDEX=https://download.pytorch.org/whl/cu128 and run with --gpus all --shm-size 8g.
FROM python:3.11-slim-bookworm

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# torch first and by itself: it is the largest layer, and changes least.
COPY constraints.txt /opt/finetune/
RUN pip install --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple -c /opt/finetune/constraints.txt torch

COPY pyproject.toml README.md LICENSE /opt/finetune/
COPY finetune /opt/finetune/finetune
COPY configs /opt/finetune/configs
COPY recipes /opt/finetune/recipes
COPY docs /opt/finetune/docs
RUN pip install -c /opt/finetune/constraints.txt "/opt/finetune[report]"

# A run needs no more rights than its own folder.
RUN useradd --uid 1000 --create-home trainer && install -d -o trainer /data
USER 1000
WORKDIR /data

ENTRYPOINT ["finetune"]
CMD ["--help"]
