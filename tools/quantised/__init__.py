"""The makers of testdata/quantised/: a file a method."""
