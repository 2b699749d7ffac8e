"""A search for a learning rate and a width by Optuna, whose pruner ends bad trials: python search.py

Each trial is a run of this process, which the program trains an epoch at a time; nothing of one reaches the next.
Needs `pip install optuna`.
"""

import optuna

from crankshaft import open_run

EPOCHS = 6


def objective(trial: optuna.Trial) -> float:
    """The accuracy of one trial on the evaluation split."""
    with open_run(
        model="mlp",
        model_arg={"hidden_units": trial.suggest_categorical("hidden_units", [16, 64, 256])},
        input="digits",
        learning_rate=trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        mode="train",
        jit="off",
        progress="off",
    ) as run:
        for epoch in range(EPOCHS):
            run.train(epochs=1)
            accuracy = run.evaluate()["accuracy"]
            trial.report(accuracy, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
    return accuracy


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
    study = search()
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"best of {len(study.trials)} trials, {pruned} of them pruned: {study.best_value:.4f} by {study.best_params}")
