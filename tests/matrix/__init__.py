"""`make matrix`: the tests of real controllers with other versions of them."""
