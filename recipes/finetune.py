"""Fine-tunes a model by a recipe.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml recipes/finetune.py --recipe quickstart

Everything that differs between runs stands in the recipe or in the Accelerate config.
"""

import sys

from toolkit.cli.finetune import finetune_command

if __name__ == "__main__":
    sys.exit(finetune_command(sys.argv[1:]))
