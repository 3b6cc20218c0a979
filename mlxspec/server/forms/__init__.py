"""The common parts of the forms of all APIs: how a body is checked, fields and their ranges, and answers about models."""
