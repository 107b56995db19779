"""``python -m functrain``: names the commands."""

if __name__ == "__main__":
    print("python -m functrain.checkpoint DIRECTORY   lists checkpoints, and verifies them")
    print("python -m functrain.launch -n 2 SCRIPT     starts processes that train together")
