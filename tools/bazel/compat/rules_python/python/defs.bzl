"""The five names of rules_python that this project loads, as Bazel 4 has them natively."""

load("@bazel_tools//tools/python:toolchain.bzl", _py_runtime_pair = "py_runtime_pair")

py_binary = native.py_binary
py_library = native.py_library
py_runtime = native.py_runtime
py_test = native.py_test
py_runtime_pair = _py_runtime_pair
