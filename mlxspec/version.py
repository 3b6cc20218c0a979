"""The version of the package, which a checkout that is not installed has as well."""

__version__ = "0.1.0"
