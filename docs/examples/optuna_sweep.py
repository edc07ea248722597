"""Optuna chooses the learning rate and the weight decay of a recipe by the held-out loss.

    python docs/examples/optuna_sweep.py --trials 8 --to outputs/sweep

Each trial is a run in a folder of its own, in this process. A study that was interrupted goes on with the next trial.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import optuna

from toolkit import finetune


def main() -> None:
    parser = argparse.ArgumentParser(description="A sweep over learning rate and weight decay.")
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--to", dest="output", type=Path, default=Path("outputs/sweep"))
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60, help="of each trial")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)

    def objective(trial: optuna.Trial) -> float:
        values = {
            "optimizer.learning_rate": trial.suggest_float("rate", 1e-4, 1e-2, log=True),
            "optimizer.weight_decay": trial.suggest_categorical("decay", [0.0, 0.1]),
            "training.output_dir": f"{options.output}/{trial.number}",
            "training.max_steps": options.steps,
            "logging.held_out_samples": 0,
            "export.enabled": False,
        }
        loss = finetune(options.recipe, values).final_eval_loss
        assert loss is not None, "the recipe holds nothing out"
        return loss

    study = optuna.create_study(storage=f"sqlite:///{options.output}/study.db", study_name="sweep", load_if_exists=True)
    study.optimize(objective, n_trials=options.trials - len(study.trials))
    print(f"best: {study.best_value:.4f} with {study.best_params}, run {options.output}/{study.best_trial.number}")


if __name__ == "__main__":
    main()
