package rueidis_test

import (
	"context"
	"fmt"

	redis "github.com/redis/rueidis"

	"holdfast"
	"holdfast/rueidis"
)

func ExampleNew() {
	option := redis.ClientOption{InitAddress: []string{"127.0.0.1:6379"}}
	client, err := redis.NewClient(option)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer client.Close()
	locks, err := rueidis.New(client, option, func(config *holdfast.Config) { config.MaxConnections = 16 })
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = locks.Close() }()
	hold, err := locks.Lock(context.Background(), "report")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("held, fence", hold.Fence())
	fmt.Println(hold.Release(context.Background()))
}
