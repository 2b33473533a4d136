package main

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"go.etcd.io/etcd/server/v3/embed"
)

// serve is one server until it is killed. It says "ready".
//
//	etcd LEAGUE FOLDER NUMBER CLIENT-ADDRESS,… PEER-ADDRESS,…
//	nats LEAGUE FOLDER NUMBER CLIENT-ADDRESS,… PEER-ADDRESS,…
func serve(kind string, arguments []string) error {
	if len(arguments) != 5 {
		return fmt.Errorf("usage: league server %s LEAGUE FOLDER NUMBER CLIENT-ADDRESSES PEER-ADDRESSES", kind)
	}
	number, err := strconv.Atoi(arguments[2])
	if err != nil {
		return err
	}
	clients, peers := strings.Split(arguments[3], ","), strings.Split(arguments[4], ",")
	start := map[string]func(string, string, int, []string, []string) error{"etcd": serveEtcd, "nats": serveNats}[kind]
	if start == nil {
		return fmt.Errorf("unknown server %q", kind)
	}
	if err := start(arguments[0], arguments[1], number, clients, peers); err != nil {
		return err
	}
	say("ready")
	select {}
}

func serveEtcd(league, folder string, number int, clients, peers []string) error {
	config := embed.NewConfig()
	config.Name = fmt.Sprint("node", number)
	config.Dir = folder
	config.LogLevel = "error"
	config.UnsafeNoFsync = league == "M"
	client, peer := url.URL{Scheme: "http", Host: clients[number]}, url.URL{Scheme: "http", Host: peers[number]}
	config.ListenClientUrls, config.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	config.ListenPeerUrls, config.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	var cluster []string
	for i, address := range peers {
		cluster = append(cluster, fmt.Sprintf("node%d=http://%s", i, address))
	}
	config.InitialCluster = strings.Join(cluster, ",")
	server, err := embed.StartEtcd(config)
	if err != nil {
		return err
	}
	select {
	case <-server.Server.ReadyNotify():
		return nil
	case err := <-server.Err():
		return err
	case <-time.After(time.Minute):
		return fmt.Errorf("etcd is not ready after a minute")
	}
}

func serveNats(league, folder string, number int, clients, peers []string) error {
	host, port, err := address(clients[number])
	if err != nil {
		return err
	}
	options := &natsserver.Options{
		ServerName: fmt.Sprint("node", number), Host: host, Port: port, JetStream: true, StoreDir: folder, NoSigs: true,
		SyncAlways: league != "M",
	}
	if len(peers) > 1 {
		host, port, err := address(peers[number])
		if err != nil {
			return err
		}
		options.Cluster = natsserver.ClusterOpts{Name: "league", Host: host, Port: port}
		for _, peer := range peers {
			options.Routes = append(options.Routes, &url.URL{Scheme: "nats", Host: peer})
		}
	}
	server, err := natsserver.NewServer(options)
	if err != nil {
		return err
	}
	go server.Start()
	if !server.ReadyForConnections(time.Minute) {
		return fmt.Errorf("NATS is not ready after a minute")
	}
	return nil
}

func address(endpoint string) (host string, port int, err error) {
	host, text, _ := strings.Cut(endpoint, ":")
	port, err = strconv.Atoi(text)
	return host, port, err
}
