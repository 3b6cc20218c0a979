"""What the forms of all APIs share: how a body is checked, fields and their ranges, and answers about models."""
