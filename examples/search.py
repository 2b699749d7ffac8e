"""A search for a learning rate and a width by Optuna, whose pruner ends what does not look good: python search.py

Each trial is a run of this process; nothing of one reaches the next. Needs `pip install crankshaft[examples]`.
"""

import optuna

from crankshaft import run
from crankshaft.engine.hooks import every_epoch


def objective(trial: optuna.Trial) -> float:
    """The accuracy of one trial on the evaluation split."""

    def prune(status, metrics):
        trial.report(status.evaluation["accuracy"], status.epoch)
        if trial.should_prune():
            status.stop = "pruned"

    done = run(
        model="mlp",
        model_arg={"hidden_units": trial.suggest_categorical("hidden_units", [16, 64, 256])},
        input="digits",
        learning_rate=trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        train_epochs=6,
        jit="off",
        progress="off",
        hooks=[every_epoch(prune)],
    )
    if done.result.get("stop") == "pruned":
        raise optuna.TrialPruned
    return done.result["eval"]["accuracy"]


def search(trials: int = 10) -> optuna.Study:
    """Runs so many trials, and returns the study."""
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1),
    )
    study.optimize(objective, n_trials=trials)
    return study


if __name__ == "__main__":
    found = search()
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in found.trials)
    print(f"best of {len(found.trials)} trials, {pruned} of them pruned: {found.best_value:.4f} by {found.best_params}")
