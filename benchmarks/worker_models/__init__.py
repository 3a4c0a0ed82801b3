"""Models of benchmarks over workers, for --params_package=benchmarks.worker_models."""
