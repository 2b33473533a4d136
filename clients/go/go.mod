module holdfast

go 1.24
