"""The prefix cache: states of earlier texts, from which prompts with the same beginning continue.

tree.py holds them in memory, disk.py in files, signature.py computes which model a file belongs to, and rows.py connects both to requests.
"""
