"""The ops, by family. Importing a module puts its ops into the table of `ttnn.ops.calling`."""
