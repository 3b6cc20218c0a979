"""The prefix store: states of earlier texts, from which prompts that begin like them continue.

tree.py holds them in memory, disk.py in files, signature.py says which model a file belongs to, and rows.py connects both to requests.
"""
