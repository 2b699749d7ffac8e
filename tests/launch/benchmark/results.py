"""Results of benchmarks for tests to show: what a run writes, and what only some runs have."""

RESULT = {
    "model": "mlp",
    "strategy": "one_device",
    "num_replicas": 1,
    "steps": 2000,
    "wall_seconds": 0.5,
    "steps_per_sec": 4000.0,
    "examples_per_sec": 256_000.0,
    "mean": 255_500.0,
    "stderr": 812.5,
    "jitter": 95.25,
    "step_ms": {"p50": 0.24951, "p90": 0.26, "p99": 0.3},
    "input_wait_fraction": 0.0123,
    "compile_seconds": 2.34,
    "peak_rss_mb": 1234.5,
    "train": {"loss": 0.12345},
    "environment": {
        "cpu": "A CPU [rev 2]",
        "usable_cores": 1.5,
        "memory_mb": 2048,
        "gpus": [],
        "load_average": [0.5, 0.25, 0.0],
        "versions": {"python": "3.12.1", "crankshaft": None},
        "threads": {"inter_op": 0, "intra_op": 2},
        "flags": {"XLA_FLAGS": "--a --b"},
    },
}

# What only some runs have.
MORE = {
    "interval": [250_000.0, 260_000.0],
    "rounds": [
        {"steps": 1000, "wall_seconds": 0.25, "steps_per_sec": 4000.0, "examples_per_sec": 256_000.0},
        {"steps": 1000, "wall_seconds": 0.2, "steps_per_sec": 5000.0, "examples_per_sec": 320_000.0},
    ],
    "reduce_fraction": None,
    "flops_per_step": 39_010_304,
    "machine": {
        "matmul_gflops": {"float32": 105.5, "bfloat16": None},
        "memory_gb_per_sec": 12.5,
        "cache_gb_per_sec": 50.0,
    },
    "roofline": {"bound": "memory", "limit_steps_per_sec": 8000.0, "share_of_limit": 0.5},
    "parts": {
        "whole": {"ms_per_step": 0.25, "repeats": 7},
        "step": {"ms_per_step": 0.2, "repeats": 7},
        "reduce": {
            "ms_per_step": 0.02,
            "gb_per_sec": 0.5,
            "bus_gb_per_sec": 0.75,
            "latency_ms": 0.125,
            "settings": [
                {"dtype": "bfloat16", "pack_mb": 0, "ms_per_step": 0.01, "gb_per_sec": 0.25, "bus_gb_per_sec": 0.375}
            ],
        },
        "checkpoint": {"mb": 12.5, "write_mb_per_sec": 1500.0, "restore_mb_per_sec": 900.0, "blocked_ms": 3.0},
        "shares": {"step": 0.8, "unexplained": 0.2},
    },
    "profile": {"trace": "x", "ops": [{"name": "mlp/[a]", "type": "MatMul", "ms_per_step": 0.1, "share": 0.4}]},
    "baseline": {
        "path": "old.json",
        "ratio": 1.25,
        "interval": [1.2, 1.3],
        "verdict": "faster",
        "rounds": [{"ours": 120.0, "theirs": 100.0, "ratio": 1.2}, {"ours": 130.0, "theirs": 100.0, "ratio": 1.3}],
    },
    "noise": {"other_cores": 0.125},
    "warnings": ["the load before the run was 3.2 [sic]"],
}
