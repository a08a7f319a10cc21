"""`make matrix` runs the tests of real controllers with other versions of the controllers."""
