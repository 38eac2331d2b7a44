"""A package, so that its tests and those of the library may have modules of one name."""
