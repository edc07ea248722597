"""Fine-tunes a model by a recipe.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml recipes/finetune.py --recipe quickstart

Everything that differs between runs stands in the recipe or in the Accelerate config.
"""

import sys

from toolkit.cli.entry import finetune

if __name__ == "__main__":
    sys.exit(finetune(sys.argv[1:]))
