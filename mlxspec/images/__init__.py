"""Images: from a file's bytes to the arrays that a vision tower reads, and to the tokens that an image takes in a prompt.

Needs NumPy and Pillow, and no MLX: all of it may run on any thread. Files are decoded in a helper process.
"""
