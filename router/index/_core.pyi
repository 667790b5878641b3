"""The compiled index, built from `core/` where there is a C++ compiler."""

core_version: int
