import os


def deep():
    raise ValueError(f"rank {os.environ['RANK']} cannot go on")


deep()
