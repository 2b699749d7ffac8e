"""A search by Ray Tune, whose scheduler ends bad trials: python ray_tune.py

Each trial is a run of a process of its own, which the program trains an epoch at a time; trials share the cluster's
cores. Connects to the cluster of RAY_ADDRESS, else starts one here. Needs `pip install 'ray[train,tune]'`.
"""

from ray import tune
from ray.tune.schedulers import ASHAScheduler

EPOCHS = 6


def objective(config: dict) -> None:
    """Trains one trial, and reports its accuracy on the evaluation split after each epoch."""
    import crankshaft

    flags = {"learning_rate": config["learning_rate"], "model_arg": {"hidden_units": config["hidden_units"]}}
    with crankshaft.open_run(model="mlp", input="digits", mode="train", jit="off", progress="off", **flags) as run:
        for _ in range(EPOCHS):
            run.train(epochs=1)
            tune.report({"accuracy": run.evaluate()["accuracy"]})


def search(trials: int = 6) -> tune.ResultGrid:
    """Runs a number of trials, and returns their reports."""
    space = {"learning_rate": tune.loguniform(1e-4, 1e-1), "hidden_units": tune.choice([16, 64, 256])}
    scheduler = ASHAScheduler(max_t=EPOCHS, grace_period=2)
    config = tune.TuneConfig(num_samples=trials, metric="accuracy", mode="max", scheduler=scheduler)
    return tune.Tuner(objective, param_space=space, tune_config=config).fit()


if __name__ == "__main__":
    best = search().get_best_result()
    print(f"best: accuracy {best.metrics['accuracy']:.4f} by {best.config}")
