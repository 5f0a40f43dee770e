#!/usr/bin/env bash
# Regenerates outrider/v1 from proto/. With --check: fails when that changes anything.
# grpcio-tools stays at 1.78: newer generators emit code that grpcio 1.78 and protobuf 6.31 refuse.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$python" -m grpc_tools.protoc -I proto -I proto/third_party \
    --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" proto/outrider/v1/*.proto
if [ "${1:-}" = --check ]; then
    diff -r -x __init__.py -x __pycache__ "$out/outrider/v1" outrider/v1 \
        || { echo "stubs differ from proto/: run 'make stubs'" >&2; exit 1; }
else
    cp "$out"/outrider/v1/* outrider/v1/
fi
