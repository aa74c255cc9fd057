# mmattn on the CPU: docker build -t mmattn . && docker run --rm -v "$PWD:/work" mmattn --help
FROM python:3.12-slim AS build
RUN pip install --no-cache-dir build
COPY . /source
RUN python -m build --wheel --outdir /dist /source

FROM python:3.12-slim
# The CPU build of torch first: the one from PyPI brings gigabytes of accelerator libraries.
RUN pip install --no-cache-dir torch torchvision --index-url https://download.pytorch.org/whl/cpu
COPY --from=build /dist /dist
RUN pip install --no-cache-dir "mmattn[all] @ file://$(echo /dist/*.whl)" && rm -r /dist
RUN useradd --create-home user && mkdir /work && chown user /work
USER user
WORKDIR /work
ENTRYPOINT ["mmattn"]
CMD ["--help"]
