{"split": "eval", "step": 1, "non_finite": 1.0}
