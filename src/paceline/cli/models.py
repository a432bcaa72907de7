"""paceline models: the table of models."""

import argparse

from paceline.models.table import TABLE

HELP = "list the models, with their parameter counts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    print(f"{'model':<14}{'parameters':>12}  {'smallest image':<16}about")
    for info in TABLE.values():
        print(f"{info.name:<14}{info.parameters:>12,}  {f'{info.min_size}x{info.min_size}':<16}{info.about}")
    print("\nParameters for MNIST: 28x28 images, one channel, 10 classes.")
    return 0
