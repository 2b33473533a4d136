package goredis_test

import (
	"fmt"

	"github.com/redis/go-redis/v9"

	"holdfast"
	"holdfast/goredis"
)

func ExampleNew() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379"})
	client, err := goredis.New(rdb, func(config *holdfast.Config) { config.MaxConnections = 16 })
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = client.Close() }()
	fmt.Println("connects when a lock is first used")
	// Output: connects when a lock is first used
}
