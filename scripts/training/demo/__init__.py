"""What the demo family was trained on: files of the standard library, conversations made from them, and pictures."""
